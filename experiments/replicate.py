"""A recipe's whole chain over several seeds, compared with published values.

    python -m experiments.replicate --recipe tldr-gpt2 --num_processes 8
    python -m experiments.replicate --recipe demo --seeds 0 1 --overrides max_steps=20

The stages of `assets/recipes/<recipe>` run in order for each seed, in separate folders. Finished
runs are not repeated, so the same command resumes where it was stopped. Then the table: values from
the recipe's `published.yaml`, and ours as the mean over seeds with standard deviation, Student's
95% interval and n. What was not run is left empty.

`--overrides` changes flags: `flag=value` in every stage that has the flag, `stage.flag=value` in
one stage, which wins. `model_name_or_path=X` and `dataset_name=X` replace what the first stage's
recipe names, wherever the recipe names it, so the stages stay a chain. The report says that a run
with overrides is not the recipe. A stage that `patches.yaml` names is run with that Python file
(`patched.py`). The commands of all stages are checked and printed before the first is run;
`--dry_run true` ends there. Rows that the recipe's `make_rows.py` makes are made first.

Writes `replication.json`, `report.html` and `report.md` to `output_dir`.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from common.config.flags import check_fields, flag
from common.config.parser import parse
from common.config.recipes import read_recipe
from common.errors import UserError, hint
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
from experiments.stages import (
    DRIVERS,
    Stage,
    check_flags,
    command,
    config_class,
    config_of,
    exit_with_status,
    is_finished,
    run,
)
from experiments.sweep.sweep_file import entry

RECIPES = Path("assets/recipes")
PUBLISHED = "published.yaml"
PATCHES = "patches.yaml"  # a Python file by stage, which `patched.py` runs before it
# The stages in order, by the names of their recipes, and their scripts. `reward-small.yaml` is a
# second recipe of `reward`.
CHAIN = {
    "sft": "train_sft.py",
    "pairs": "experiments/sample_pairs.py",
    "reward": "train_reward.py",
    "dpo": "train_dpo.py",
    "grpo": "train_grpo.py",
    "evaluate": "evaluate.py",
    "frontier": "experiments/overoptimization/__main__.py",
}
# Overrides of all stages by which another name stands wherever the recipe has the first stage's
START = ("model_name_or_path", "dataset_name")


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
            stages = [path for stage in CHAIN for path in RECIPES.glob(f"*/{stage}.yaml")]
            known = sorted({path.parent.name for path in stages})
            raise UserError(f"--recipe is {self.recipe!r}; it must be one of {', '.join(known)}.")
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"--seeds is {self.seeds}; it must be one or more distinct numbers.")
        self.output_dir = self.output_dir or f"output/replicate/{self.recipe}"


Measured = dict[tuple[str, str], dict[int, float]]  # by system and metric: a value by seed


@dataclass(frozen=True)
class Published:
    """A line of `published.yaml`: a reported value of a system."""

    system: str  # as the recipe names its stage
    metric: str
    source: str
    value: float | None = None  # accuracies and rates as shares of 1
    note: str = ""


def main(config: ReplicateConfig) -> None:
    """Run every seed's chain, and report."""
    published = read_published(RECIPES / config.recipe / PUBLISHED)
    chains = {seed: chain(config, seed) for seed in config.seeds}
    stages = [stage for by_name in chains.values() for stage in by_name.values()]
    if not config.report_only:
        check_flags(stages)
        for stage in stages:
            print(shlex.join(command(stage, config.num_processes)), flush=True)
        if config.dry_run:
            return
        make_rows(config, stages)
        for stage in stages:
            run(stage, config.num_processes)
    finished = {
        seed: {name: stage.output_dir for name, stage in by_name.items() if is_finished(stage)}
        for seed, by_name in chains.items()
    }
    ours = measured(finished, published)
    record = {
        "recipe": config.recipe,
        "seeds": config.seeds,
        "overrides": config.overrides,
        "published": [asdict(row) for row in published],
        "ours": [
            {
                "system": system,
                "metric": metric,
                "by_seed": by_seed,
                **summary(metric, by_seed.values()),
            }
            for (system, metric), by_seed in ours.items()
        ],
    }
    title, file = f"Replication of {config.recipe}", Path(config.output_dir) / "replication.json"
    facts = {"recipe": config.recipe, "seeds": ", ".join(map(str, config.seeds))}
    run_dirs = [run_dir for by_name in finished.values() for run_dir in by_name.values()]
    write_results(file, record, title, report(config, published, ours), facts, run_dirs)


# ---- the chain -----------------------------------------------------------------------------------


def chain(config: ReplicateConfig, seed: int) -> dict[str, Stage]:
    """The stages of a seed, by their recipes' names.

    Raises:
        UserError: an override is of no stage.
    """
    folder = RECIPES / config.recipe
    every = sorted(path.stem for path in folder.glob("*.yaml"))
    names = [name for stage in CHAIN for name in every if name.partition("-")[0] == stage]
    recipes = {name: read_recipe(str(folder / f"{name}.yaml")) for name in names}
    root = f"{config.output_dir}/seed_{seed}/"
    text = replaced(json.dumps(recipes), f"output/{config.recipe}/", root, whole=False)
    overrides: dict[str, dict[str, Any]] = {name: {} for name in names}
    # Those of one stage last: they win
    for override in sorted(config.overrides, key=lambda text: "." in text.partition("=")[0]):
        name, _, value = override.partition("=")
        takers = stages_with(override, names)
        if name in START and name in recipes[names[0]]:
            text = replaced(text, recipes[names[0]][name], value)
        else:
            is_list = value.startswith("[") and value.endswith("]")
            changed = {name.rpartition(".")[2]: yaml.safe_load(value) if is_list else value}
            overrides |= {taker: overrides[taker] | changed for taker in takers}
    patches = read_recipe(str(folder / PATCHES)) if (folder / PATCHES).is_file() else {}
    stages = {}
    for name, recipe in json.loads(text).items():
        changes = {flag: value for flag, value in recipe.items() if value != recipes[name][flag]}
        script, flags = script_of(name), {"seed": seed, **changes, **overrides[name]}
        if script in DRIVERS:
            flags |= {"seeds": [seed], "num_processes": config.num_processes}
        output_dir = Path(flags.pop("output_dir"))
        patch = Path(patches[name]) if name in patches else None
        stages[name] = Stage(script, output_dir, folder / f"{name}.yaml", flags, patch)
    return stages


def script_of(name: str) -> str:
    """The script of a recipe by its name."""
    return CHAIN[name.partition("-")[0]]


def replaced(text: str, old: str, new: str, *, whole: bool = True) -> str:
    """JSON in which texts that are `old`, or begin with it, are or begin with `new`."""
    old, new = json.dumps(old), json.dumps(new)
    return text.replace(old, new) if whole else text.replace(old[:-1], new[:-1])


def stages_with(override: str, names: Sequence[str]) -> list[str]:
    """The stages whose flags an override changes, of the recipes' `names`.

    Raises:
        UserError: there is none, or no `=`.
    """
    name, equals, _ = override.partition("=")
    stage, _, flag_name = name.rpartition(".")
    known = {}
    for taker in names:
        cls = config_class(script_of(taker))
        known[taker] = {f.name for f in fields(cls)} - {"seed", "output_dir"}
    takers = [taker for taker in names if flag_name in known[taker] and stage in ("", taker)]
    if not equals or not takers:
        raise UserError(
            f"--overrides has {override!r}; it must be flag=value or stage.flag=value with a flag "
            f"of {', '.join(names)} ({hint(flag_name, set().union(*known.values()))})."
        )
    return takers


def make_rows(config: ReplicateConfig, stages: Iterable[Stage]) -> None:
    """Run the recipe's `make_rows.py`, if a folder `data/...` of its rows is not there.

    Raises:
        UserError: it could not make them, as without a network.
    """
    maker = RECIPES / config.recipe / "make_rows.py"
    names = [config_of(stage).dataset_name for stage in stages]
    missing = [name for name in names if name.startswith("data/") and not Path(name).exists()]
    if missing and maker.is_file():
        print(f"{missing[0]} does not exist: python {maker}", flush=True)
        if subprocess.run([sys.executable, str(maker)], check=False).returncode:
            raise UserError(
                f"{missing[0]} does not exist and `python {maker}` could not make it; give it "
                "local copies by the flags that it names above, or use --overrides dataset_name=."
            )


# ---- measured and published values ---------------------------------------------------------------


def measured(
    finished: Mapping[int, Mapping[str, Path]], published: Sequence[Published]
) -> Measured:
    """Every outcome of every finished run by seed and stage, in its unit."""
    found: Measured = {}
    for seed, run_dirs in finished.items():
        systems = systems_by_run(run_dirs["evaluate"]) if "evaluate" in run_dirs else {}
        for name, run_dir in run_dirs.items():
            asked = [row.metric for row in published if row.system == name]
            for metric in dict.fromkeys([*OUTCOMES, *judges(systems), *asked]):
                value = outcome_of(metric, run_dir, systems)
                if value is not None:
                    found.setdefault((name, metric), {})[seed] = value
    return found


def read_published(file: Path) -> list[Published]:
    """The lines of `published.yaml`; none where there is no such file."""
    rows = read_recipe(str(file), typed=True)["published"] if file.is_file() else []
    return [entry(Published, row, f"{file}, published[{i}]") for i, row in enumerate(rows)]


# ---- the report ----------------------------------------------------------------------------------


def comparison(published: Sequence[Published], ours: Measured) -> Table:
    """Published values and ours, a row for each system and metric."""
    headers = ["system", "metric", "published", "ours", "95% interval", "n"]
    sources, rows = list(dict.fromkeys(row.source for row in published)), []
    for key in dict.fromkeys([*((row.system, row.metric) for row in published), *ours]):
        outcome, cells = about(key[1]), ["", "", ""]
        reported = [
            f"{outcome.scale * row.value:.4g} ({1 + sources.index(row.source)})"
            for row in published
            if (row.system, row.metric) == key and row.value is not None
        ]
        if key in ours:
            mean = over_seeds(ours[key].values())
            interval = seeds_interval(list(ours[key].values()), is_share=outcome.is_share)
            cells = [mean.spread, interval, str(mean.n)]
        rows.append([key[0], outcome.heading, "; ".join(reported), *cells])
    return Table(headers, rows, "Numbers in brackets are those of the sources below.")


def source_lines(published: Sequence[Published]) -> list[str]:
    """The sources as a list, each with the notes on its values."""
    lines = []
    for number, source in enumerate(dict.fromkeys(row.source for row in published), start=1):
        notes = dict.fromkeys(row.note for row in published if row.source == source and row.note)
        lines.append(f"- ({number}) {source}{': ' if notes else ''}{' '.join(notes)}")
    return lines


def report(config: ReplicateConfig, published: Sequence[Published], ours: Measured) -> list[Block]:
    """The blocks of the page."""
    blocks: list[Block] = [
        f"Ours: mean \N{PLUS-MINUS SIGN} standard deviation over the n finished seeds of "
        f"{config.seeds}, and Student's 95% interval, which covers the seed of training and not "
        "the draw of the held-out rows; of a share whose interval would leave 0 to 100 the seeds' "
        "values, in round brackets. Empty: not run, or not reported. Published values are as "
        "their source has them, on its rows and with its judges."
    ]
    if config.overrides:
        changed = ", ".join(f"`{text}`" for text in config.overrides)
        blocks.append(f"**This is not the recipe**: its flags are changed by {changed}.")
    blocks.append(comparison(published, ours))
    if published:
        blocks.append(Section("Sources", ["\n".join(source_lines(published))]))
    return blocks


if __name__ == "__main__":
    exit_with_status(lambda: main(parse(ReplicateConfig)))
