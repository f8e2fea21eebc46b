"""A recipe's whole chain over several seeds, beside what others have published.

    python -m experiments.replicate --recipe tldr-gpt2 --num_processes 8
    python -m experiments.replicate --recipe demo --seeds 0 1 --overrides max_steps=20

The stages of `assets/recipes/<recipe>` are made in order for each seed, in folders of their own;
what is finished is not made again, so the same command goes on where it was stopped. Then the
table: values from `published.yaml` beside the recipe, and ours as the mean over seeds with standard
deviation, Student's 95% interval and n. What was not run is left empty.

`--overrides` changes flags: `flag=value` in every stage that has the flag, `stage.flag=value` in
one, which wins over the other in any order. `model_name_or_path=X` and `dataset_name=X` are for the
stages whose recipe names one that no earlier stage makes: the chain starts from X and stays a
chain. `dataset_name=X` is also for the flags that name SFT's data set (`prompts_dataset_name`,
`sft_dataset_name`), and refused where the recipes of its stages name different ones. A stage that
`patches.yaml` names is run with that Python file (`patched.py`). A run with overrides is not the
recipe any more, and the report says so. The commands of all stages are printed, and checked, before
the first is run; `--dry_run true` ends there. Rows that the recipe's `make_rows.py` makes are made
first, if they are not there.

Writes `replication.json`, `report.html` and `report.md` to `output_dir`.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.checkpoint import best
from common.config import flag
from common.errors import UserError, check_fields
from common.evaluation.score import run_cost
from common.flags.hints import config_class
from common.flags.parser import parse
from common.flags.recipes import read_recipe
from common.record.folder import ENVIRONMENT, read_config
from common.report.blocks import Block, Section, Table
from experiments.outcomes import (
    OUTCOMES,
    about,
    judges,
    outcome_of,
    over_seeds,
    seeds_interval,
    summary,
    systems_by_run,
    write_results,
)
from experiments.overrides import read_overrides
from experiments.stages import (
    Stage,
    command,
    exit_with_status,
    is_finished,
    run,
    script_arguments,
)
from experiments.sweep.sweep_file import entry

RECIPES = Path("assets/recipes")
PUBLISHED = "published.yaml"
PATCHES = "patches.yaml"  # a Python file by stage, which `patched.py` runs before it
# The stages in order: their recipe and their script.
CHAIN = {
    "sft": "train_sft.py",
    "pairs": "experiments/sample_pairs.py",
    "reward": "train_reward.py",
    "dpo": "train_dpo.py",
    "grpo": "train_grpo.py",
    "evaluate": "evaluate.py",
}


@dataclass
class ReplicateConfig:
    """What is replicated, and how often."""

    recipe: str = flag("", "folder in assets/recipes, as tldr-gpt2 (required)")
    seeds: list[int] = flag([0, 1, 2], "one chain for each", required=True, ge=0)
    num_processes: int = flag(
        1, "processes of a stage on this machine, by torchrun if several", gt=0
    )
    output_dir: str = flag("", "folder of all runs (empty: output/replicate/<recipe>)")
    overrides: list[str] = flag([], "flag=value for all stages that have it, or stage.flag=value")
    report_only: bool = flag(False, "run nothing: report what is finished")
    dry_run: bool = flag(False, "check and print the commands of all stages, and end")

    def __post_init__(self) -> None:
        """Refuse what cannot be replicated."""
        check_fields(self)
        if not self.recipe or not (RECIPES / self.recipe).is_dir():
            known = sorted(path.parent.name for path in RECIPES.glob("*/grpo.yaml"))
            raise UserError(f"--recipe is {self.recipe!r}; it must be one of {', '.join(known)}.")
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"--seeds is {self.seeds}; it must be one or more distinct numbers.")
        self.output_dir = self.output_dir or f"output/replicate/{self.recipe}"


Chains = Mapping[int, Mapping[str, Stage]]  # by seed, then by the names of their recipes
Measured = dict[tuple[str, str], dict[int, float]]  # by system and metric: a value by seed


@dataclass(frozen=True)
class Published:
    """A line of `published.yaml`: what somebody reports of a system."""

    system: str  # as the recipe names its stage
    metric: str
    source: str
    value: float | None = None  # accuracies and rates as shares of 1
    note: str = ""
    origin: bool = False  # the implementation that this project started from


def main(config: ReplicateConfig) -> None:
    """Run every seed's chain, and report."""
    published = read_published(RECIPES / config.recipe / PUBLISHED)
    chains = {seed: chain(config, seed) for seed in config.seeds}
    if not config.report_only:
        show_commands(config, chains)
        if config.dry_run:
            return
        make_rows(config, chains)
        for stages in chains.values():
            for stage in stages.values():
                run(stage, config.num_processes)
    finished = {
        seed: {name: stage.output_dir for name, stage in stages.items() if is_finished(stage)}
        for seed, stages in chains.items()
    }
    found = measured(finished, published)
    run_dirs = [run_dir for made in finished.values() for run_dir in made.values()]
    spent = cost(run_dirs)
    record = {
        "recipe": config.recipe,
        "seeds": config.seeds,
        "overrides": config.overrides,
        "cost": spent,
        "published": [asdict(row) for row in published],
        "ours": [
            {"system": system, "metric": metric, "by_seed": own, **summary(metric, own.values())}
            for (system, metric), own in found.items()
        ],
    }
    title, file = f"Replication of {config.recipe}", Path(config.output_dir) / "replication.json"
    facts = {"recipe": config.recipe, "seeds": ", ".join(map(str, config.seeds))}
    blocks = report(config, published, found, spent)
    write_results(file, record, title, blocks, facts, run_dirs)


# ---- the chain -----------------------------------------------------------------------------------


def chain(config: ReplicateConfig, seed: int) -> dict[str, Stage]:
    """The stages of a seed, by their recipes' names.

    Raises:
        UserError: an override is of no stage, or a data set of all is for different ones.
    """
    folder = RECIPES / config.recipe
    names = [name for name in CHAIN if (folder / f"{name}.yaml").is_file()]
    recipes = {name: read_recipe(str(folder / f"{name}.yaml")) for name in names}
    # What begins with the recipe's folder of runs, as the JSON of a text
    old = json.dumps(f"output/{config.recipe}/")[:-1]
    new = json.dumps(f"{config.output_dir}/seed_{seed}/")[:-1]
    moved = json.loads(json.dumps(recipes).replace(old, new))
    own = {n: {f: v for f, v in moved[n].items() if v != recipes[n][f]} for n in names}
    classes = {n: config_class(CHAIN[n]) for n in names}
    known = {n: {f.name for f in fields(cls)} - {*cls.unused} for n, cls in classes.items()}
    overrides = read_overrides(config.overrides, recipes, own, known)
    patches = read_recipe(str(folder / PATCHES)) if (folder / PATCHES).is_file() else {}
    stages = {}
    for name in names:
        patch = Path(patches[name]) if name in patches else None
        flags = {"seed": seed, **own[name], **overrides[name]}
        output_dir = Path(flags.pop("output_dir"))
        stages[name] = Stage(CHAIN[name], output_dir, folder / f"{name}.yaml", flags, patch)
    return stages


def make_rows(config: ReplicateConfig, chains: Chains) -> None:
    """Run the recipe's `make_rows.py`, if a folder `data/...` of its rows is not there.

    Raises:
        UserError: it could not make them, as without a network.
    """
    maker = RECIPES / config.recipe / "make_rows.py"
    stages = [stage for stages in chains.values() for stage in stages.values()]
    names = [parse(config_class(s.script), script_arguments(s)).dataset_name for s in stages]
    missing = [name for name in names if name.startswith("data/") and not Path(name).exists()]
    if missing and maker.is_file():
        print(f"{missing[0]} does not exist: python {maker}", flush=True)
        if status := subprocess.run([sys.executable, str(maker)], check=False).returncode:
            raise UserError(
                f"{missing[0]} does not exist and `python {maker}` could not make it (status "
                f"{status}); give it local copies by the flags that it names above, or your own "
                "rows, --overrides dataset_name=PATH."
            )


def show_commands(config: ReplicateConfig, chains: Chains) -> None:
    """Print the commands of all chains; raise a UserError for flags that a stage would refuse."""
    every = [(name, stage) for stages in chains.values() for name, stage in stages.items()]
    for name, stage in every:
        try:
            best.refuse_impossible(parse(config_class(stage.script), script_arguments(stage)))
        except UserError as error:
            raise UserError(
                f"stage {name} of --recipe {config.recipe}: {error} "
                "(--overrides stage.flag=value is for one stage.)"
            ) from None
    for _, stage in every:
        print(shlex.join(command(stage, config.num_processes)), flush=True)


# ---- what was measured, and what others report ---------------------------------------------------


def measured(
    finished: Mapping[int, Mapping[str, Path]], published: Sequence[Published]
) -> Measured:
    """Every outcome of every finished run by seed and stage, in its unit."""
    found: Measured = {}
    for seed, own in finished.items():
        made = dict(own)
        evaluation = made.pop("evaluate", None)
        systems = systems_by_run(evaluation) if evaluation else {}
        for name, run_dir in made.items():
            asked = [row.metric for row in published if row.system == name]
            for metric in dict.fromkeys([*OUTCOMES, *judges(systems), *asked]):
                value = outcome_of(metric, run_dir, systems)
                if value is not None:
                    found.setdefault((name, metric), {})[seed] = value
    return found


def cost(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Hours of training of the runs times their processes, by what they ran on; as recorded."""
    hours: dict[str, float] = {}
    for run_dir in run_dirs:
        environment = read_config(run_dir, ENVIRONMENT)
        minutes = run_cost(run_dir).get("elapsed_minutes", 0.0)
        kind = environment.get("gpu") or "CPU process"
        hours[kind] = hours.get(kind, 0.0) + minutes / 60 * environment["world_size"]
    return {"hours": hours, "unit": "hours of training", "runs": len(run_dirs)}


def read_published(file: Path) -> list[Published]:
    """The lines of `published.yaml`; none where there is no such file.

    Raises:
        UserError: it is not as it should be.
    """
    rows = (read_recipe(str(file), typed=True).get("published") if file.is_file() else None) or []
    rows = rows if isinstance(rows, list) else [rows]
    found = [entry(Published, row, f"{file}, published[{i}],") for i, row in enumerate(rows)]
    for row in found:
        if not isinstance(row.value, int | float | None):
            raise UserError(f"{file} has the value {row.value!r}; it must be a number, as 0.001.")
    return found


# ---- the report ----------------------------------------------------------------------------------


def comparison(published: Sequence[Published], found: Measured) -> Table:
    """Published values, the origin's and ours, a row for each system and metric."""
    headers = ["system", "metric", "published", "origin", "ours", "95% interval", "n"]
    sources, rows = list(dict.fromkeys(row.source for row in published)), []
    for key in dict.fromkeys([*((row.system, row.metric) for row in published), *found]):
        outcome, cells = about(key[1]), ["", "", ""]
        reported: dict[bool, list[str]] = {False: [], True: []}  # by whether it is the origin's
        for row in published:
            if (row.system, row.metric) == key and row.value is not None:
                text = f"{outcome.scale * row.value:.4g} ({1 + sources.index(row.source)})"
                reported[row.origin].append(text)
        if key in found:
            mean = over_seeds(found[key].values())
            interval = seeds_interval(list(found[key].values()), is_share=outcome.is_share)
            cells = [mean.spread, interval, str(mean.n)]
        rows.append([key[0], outcome.heading, *map("; ".join, reported.values()), *cells])
    return Table(headers, rows, "Numbers in brackets are those of the sources below.")


def source_lines(published: Sequence[Published]) -> list[str]:
    """The sources as a list, each with the notes on its values."""
    lines = []
    for number, source in enumerate(dict.fromkeys(row.source for row in published), start=1):
        notes = dict.fromkeys(row.note for row in published if row.source == source and row.note)
        lines.append(f"- ({number}) {source}{': ' if notes else ''}{' '.join(notes)}")
    return lines


def report(
    config: ReplicateConfig,
    published: Sequence[Published],
    found: Measured,
    spent: Mapping[str, Any],
) -> list[Block]:
    """What the page shows."""
    hours = ", ".join(f"{n:.2f} {kind}-{spent['unit']}" for kind, n in spent["hours"].items())
    reading = (
        f"Ours: mean \N{PLUS-MINUS SIGN} standard deviation over the n seeds that were run of "
        f"{config.seeds}, and Student's 95% interval, which covers the seed of training and not "
        "the draw of the held-out rows; of a share whose interval would leave 0 to 100 the seeds' "
        "values, in round brackets. Empty: not run, or not reported. Others' values are as "
        "their source has them, on its rows and with its judges. "
        f"Cost: {hours or 'none'} in {spent['runs']} runs."
    )
    blocks: list[Block] = [reading]
    if config.overrides:
        changed = ", ".join(f"`{text}`" for text in config.overrides)
        how = "it was run with" if found else "nothing has run yet, and it would be with"
        blocks.append(f"**This is not the recipe**: {how} {changed}.")
    blocks.append(comparison(published, found))
    if published:
        blocks.append(Section("Sources", ["\n".join(source_lines(published))]))
    return blocks


if __name__ == "__main__":
    exit_with_status(lambda: main(parse(ReplicateConfig)))
