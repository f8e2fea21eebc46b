"""A recipe's whole chain over several seeds, compared with published values.

    python -m experiments.runs.replicate --recipe tldr-gpt2 --num_processes 8
    python -m experiments.runs.replicate --recipe demo --seeds 0 1 --overrides max_steps=20

The stages of `assets/recipes/<recipe>` run in order for each seed, in separate folders. Finished
runs are not repeated, so the same command resumes where it was stopped. Then the table: values from
the recipe's `published.yaml`, and ours as the mean over seeds with standard deviation, Student's
95% interval and n. What was not run is left empty.

A recipe is a folder in `assets/recipes` or any other; the runs' folders take the place of the
`output_dir` that its files name.

`--overrides` changes flags: `flag=value` in every stage that has the flag, `stage.flag=value` in
one stage, which wins. `model_name_or_path=X` and `dataset_name=X` replace the first stage's model
and data set wherever a flag of the recipe names them as a model or as a data set, so the stages
stay a chain; with a model comes its tokenizer, unless X is a config (.json). The report says that a
run with overrides is not the recipe. A stage that `patches.yaml` names is run with that Python file
(`patched.py`). The flags of all stages are checked before the first is run. `--dry_run` prints the
runs with their commands, and ends.

Writes `replication.json`, `report.html` and `report.md` to `output_dir`.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml

from common.config.flags import flag
from common.config.parser import parse
from common.config.recipes import read_recipe
from common.errors import UserError, hint
from experiments.runs.engine import print_runs, run_stages
from experiments.runs.executors import StudyFlags
from experiments.runs.outcomes import measured, systems_by_run, value_records, write_results
from experiments.runs.replication import differences, read_published, report
from experiments.runs.stages import (
    CHAIN,
    DRIVERS,
    ROOT,
    Stage,
    check_flags,
    config_class,
    config_of,
    exit_with_status,
    is_finished,
    moved,
)
from experiments.runs.sweep.effects import effect_records

RECIPES = Path("assets/recipes")
PUBLISHED, ROW_MAKER = "published.yaml", "make_rows.py"
PATCHES = "patches.yaml"  # a Python file by stage, which `patched.py` runs before it
# Overrides of all stages by which another name stands wherever the recipe has the first stage's
START = ("model_name_or_path", "dataset_name")


@dataclass
class ReplicateConfig(StudyFlags):
    """A recipe whose chain is run."""

    _recipe: ClassVar = "what"
    recipe: str = flag("", "folder, or name of one in assets/recipes, as tldr-gpt2 (required)")
    output_dir: str = flag("", "folder of all runs (empty: output/replicate/<recipe>)")
    overrides: list[str] = flag([], "flag=value for all stages that have it, or stage.flag=value")
    report_only: bool = flag(False, "run nothing: report what is finished")

    def __post_init__(self) -> None:
        """Refuse what cannot be replicated."""
        super().__post_init__()
        if not self.recipe or not stages_of(self.folder):
            names = {path.parent.name for path in (ROOT / RECIPES).glob("*/*.yaml")}
            chains = [name for name in sorted(names) if stages_of(ROOT / RECIPES / name)]
            raise UserError(
                f"--recipe is {self.recipe!r}; it must be a folder with recipes of stages "
                f"({', '.join(f'{stage}.yaml' for stage in CHAIN)}), or one of {', '.join(chains)}."
            )
        self.output_dir = self.output_dir or f"output/replicate/{self.name}"

    @property
    def folder(self) -> Path:
        """The recipe's folder; a name is one of `assets/recipes`, here or in the project."""
        recipe = Path(self.recipe).expanduser()
        folders = (RECIPES / recipe, ROOT / RECIPES / recipe, recipe)
        return next(filter(stages_of, folders), recipe)

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.folder.resolve().name


def main(config: ReplicateConfig) -> None:
    """Run every seed's chain, and report."""
    published = read_published(config.folder / PUBLISHED)
    chains = {seed: chain(config, seed) for seed in config.seeds}
    stages = [stage for by_name in chains.values() for stage in by_name.values()]
    if not config.report_only:
        check_flags(stages)
        print_runs(stages)
        if config.dry_run:
            return
        refuse_missing_rows(config, stages)
        run_stages(stages, config, Path(config.output_dir))
    finished = {
        seed: {name: stage.output_dir for name, stage in by_name.items() if is_finished(stage)}
        for seed, by_name in chains.items()
    }
    systems = {
        seed: systems_by_run(*(run_dirs[name] for name in run_dirs if name == "evaluate"))
        for seed, run_dirs in finished.items()
    }
    ours = measured(finished, systems, [row.metric for row in published])
    record = {
        "recipe": config.recipe,
        "seeds": config.seeds,
        "finished": {seed: list(run_dirs) for seed, run_dirs in finished.items()},
        "overrides": config.overrides,
        "published": [asdict(row) for row in published],
        "ours": value_records(ours),
        "differences": effect_records(differences(ours)),
    }
    title, file = f"Replication of {config.name}", Path(config.output_dir) / "replication.json"
    facts = {"recipe": config.name, "seeds": ", ".join(map(str, config.seeds))}
    run_dirs = [run_dir for by_name in finished.values() for run_dir in by_name.values()]
    status = seeds_finished(chains, finished)
    if config.overrides:
        changed = ", ".join(f"`{text}`" for text in config.overrides)
        status += f" **This is not the recipe**: its flags are changed by {changed}."
    blocks = [status, *report(published, ours, file.parent)]
    write_results(file, record, title, blocks, facts, run_dirs)
    print(seeds_finished(chains, finished))


def seeds_finished(chains: Mapping[int, Mapping[str, Stage]], finished: Mapping[int, Any]) -> str:
    """The number of finished seeds, and what the others lack."""
    lacking = {
        seed: [name for name in by_name if name not in finished[seed]]
        for seed, by_name in chains.items()
    }
    texts = [f"seed {seed} lacks {', '.join(names)}" for seed, names in lacking.items() if names]
    text = f"{len(chains) - len(texts)} of {len(chains)} seeds finished"
    return f"{'; '.join([text, *texts])}."


# ---- the chain -----------------------------------------------------------------------------------


def stages_of(folder: Path) -> list[str]:
    """The names of a folder's recipes of stages, in the order of the chain."""
    every = sorted(path.stem for path in folder.glob("*.yaml"))
    return [name for stage in CHAIN for name in every if name.partition("-")[0] == stage]


def chain(config: ReplicateConfig, seed: int) -> dict[str, Stage]:
    """The stages of a seed, by their recipes' names."""
    folder, names = config.folder, stages_of(config.folder)
    recipes = {name: read_recipe(str(folder / f"{name}.yaml")) for name in names}
    folders = run_folders(recipes, f"{config.output_dir}/seed_{seed}")
    start: dict[str, dict[str, str]] = {name: {} for name in START}  # other names by those there
    overrides: dict[str, dict[str, Any]] = {name: {} for name in names}
    # Those of one stage last: they win
    for override in sorted(config.overrides, key=lambda text: "." in text.partition("=")[0]):
        name, _, value = override.partition("=")
        takers = stages_with(override, names)
        if name in START and name in recipes[names[0]]:
            start[name] = {recipes[names[0]][name]: value}
        else:
            is_list = value.startswith("[") and value.endswith("]")
            changed = {name.rpartition(".")[2]: yaml.safe_load(value) if is_list else value}
            for taker in takers[:1] if name in START else takers:
                overrides[taker] |= changed
    patches = read_recipe(str(folder / PATCHES)) if (folder / PATCHES).is_file() else {}
    stages = {}
    for name, recipe in recipes.items():
        script, changes = script_of(name), {}
        paths = {f.name for f in fields(config_class(script)) if f.metadata["is_path"]}
        for key, value in recipe.items():
            names_of_key = other_names(key, value, start) if key in paths else {}
            new = moved(moved(value, names_of_key), folders)
            if new != value:
                changes[key] = new
        flags = {"seed": seed, **changes, **overrides[name]}
        if script in DRIVERS:
            flags |= {"seeds": [seed], "num_processes": config.num_processes}
        output_dir = Path(flags.pop("output_dir", f"{config.output_dir}/seed_{seed}/{name}"))
        patch = Path(patches[name]) if name in patches else None
        recipe_file, processes = folder / f"{name}.yaml", config.num_processes
        stages[name] = Stage(
            script, output_dir, recipe_file, flags, patch=patch, num_processes=processes
        )
    return stages


def script_of(name: str) -> str:
    """The script of a recipe by its name."""
    return CHAIN[name.partition("-")[0]]


def run_folders(recipes: Mapping[str, Mapping[str, Any]], root: str) -> dict[str, str]:
    """The folder in `root` of each stage's run, by the folder that its recipe names."""
    named = [(name, recipe.get("output_dir", name).rstrip("/")) for name, recipe in recipes.items()]
    stages = {os.path.normpath(old): name for name, old in named}
    for name, old in named:
        if name != (other := stages[os.path.normpath(old)]):
            raise UserError(f"{name}.yaml and {other}.yaml have the same output_dir: {old}.")
    top = os.path.commonpath([Path(old).absolute().parent for _, old in named])
    return {old: f"{root}/{os.path.relpath(old, top)}" for _, old in named}


def other_names(key: str, value: Any, start: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Other names for a flag's value: of data sets, of models, or none for a tokenizer.

    A config (.json) has no tokenizer: with it the recipe's tokenizer stays.
    """
    names = start[START[key.endswith("dataset_name")]]
    if key != "tokenizer_name_or_path":
        return names
    return {value: ""} if any(not new.endswith(".json") for new in names.values()) else {}


def stages_with(override: str, names: Sequence[str]) -> list[str]:
    """The stages whose flags an override changes, of the recipes' `names`."""
    name, equals, _ = override.partition("=")
    stage, _, flag_name = name.rpartition(".")
    flags_of = {}
    for taker in names:
        cls = config_class(script_of(taker))
        flags_of[taker] = {f.name for f in fields(cls)} - {"seed", "output_dir"}
    takers = [taker for taker in names if flag_name in flags_of[taker] and stage in ("", taker)]
    if not equals or not takers:
        raise UserError(
            f"--overrides has {override!r}; it must be flag=value or stage.flag=value with a flag "
            f"of {', '.join(names)} ({hint(flag_name, set().union(*flags_of.values()))})."
        )
    return takers


def refuse_missing_rows(config: ReplicateConfig, stages: Iterable[Stage]) -> None:
    """Raise a UserError if rows are not there that the recipe's `make_rows.py` makes."""
    maker, names = config.folder / ROW_MAKER, [config_of(stage).dataset_name for stage in stages]
    missing = [name for name in names if name.startswith("data/") and not Path(name).exists()]
    if missing and maker.is_file():
        raise UserError(f"{missing[0]} does not exist; `python {maker}` makes it.")


if __name__ == "__main__":
    exit_with_status(lambda: main(parse(ReplicateConfig)))
