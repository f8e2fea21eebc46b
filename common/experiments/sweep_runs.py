"""The runs of a sweep: which there are for a seed, on top of which others, in which folders."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from common.evaluation.score import run_cost
from common.experiments.stages import Stage, is_finished
from common.experiments.sweep_file import POLICY_SCRIPTS, Sweep, Variant, filled_in


def seed_dir(sweep: Sweep, seed: int) -> Path:
    """Where the runs of a seed are."""
    return Path(sweep.output_dir) / f"seed_{seed}"


def folders_of(sweep: Sweep, seed: int, variant: Variant | None) -> dict[str, Path]:
    """The folder of every stage as a variant sees it: its own, where it makes the stage again."""
    root = seed_dir(sweep, seed)
    folders = {name: root / "base" / name for name in sweep.base}
    if variant:
        for name in (variant.stage, *variant.then):
            folders[name] = root / variant.slug / name
    return folders


def training(sweep: Sweep, seed: int) -> Iterator[tuple[Stage, int]]:
    """Every training run of a seed and its number of processes, the base chain first."""
    base = folders_of(sweep, seed, None)
    for name in sweep.base:
        yield training_stage(sweep, seed, name, base), 1
    for variant in sweep.variants:
        folders = folders_of(sweep, seed, variant)
        stage = training_stage(sweep, seed, variant.stage, folders)
        flags = {**stage.flags, **filled_in(variant.flags, folders)}
        patch = Path(variant.patch) if variant.patch else None
        yield replace(stage, flags=flags, patch=patch), variant.num_processes
        for name in variant.then:
            yield training_stage(sweep, seed, name, folders), 1


def training_stage(sweep: Sweep, seed: int, name: str, folders: Mapping[str, Path]) -> Stage:
    """A stage of the base chain, on top of the stages in the given folders."""
    base = sweep.base[name]
    flags = {"seed": seed, **filled_in(base.flags, folders)}
    return Stage(base.script, folders[name], Path(base.config), flags)


def finished_part(sweep: Sweep) -> Sweep:
    """The sweep without the variants of which a training run is not finished, for any seed."""
    unfinished = {
        stage.output_dir.parent.name
        for seed in sweep.seeds
        for stage, _ in training(sweep, seed)
        if not is_finished(stage)
    }
    return replace(sweep, variants=[v for v in sweep.variants if v.slug not in unfinished])


def evaluations(sweep: Sweep, seed: int) -> Iterator[Stage]:
    """The two runs of evaluate.py that judge a seed: of policies, and of reward models."""
    evaluation = sweep.evaluation
    base = folders_of(sweep, seed, None)
    policies = [str(run_dir / "model") for run_dir in judged(sweep, seed, policies=True)]
    models = [str(run_dir / "model") for run_dir in judged(sweep, seed, policies=False)]
    common = {"seed": seed, **filled_in(evaluation.flags, base)}
    config, root = Path(evaluation.config), seed_dir(sweep, seed) / "evaluation"
    if policies:
        judge = [str(base[evaluation.judge] / "model")] if evaluation.judge else []
        judges = {
            "policies": policies,
            "ref_model_name_or_path": str(base[evaluation.reference] / "model"),
            "reward_models": judge,
        }
        flags = {**common, **filled_in(evaluation.policy_flags, base), **judges}
        yield Stage("evaluate.py", root / "policies", config, flags)
    if models:
        flags = {"policies": [], "reward_models": models, "reward_funcs": []}
        yield Stage("evaluate.py", root / "reward_models", config, {**common, **flags})


def judged(sweep: Sweep, seed: int, *, policies: bool) -> list[Path]:
    """The folders of the runs that are judged, of policies or of reward models, base first."""

    def is_wanted(name: str) -> bool:
        return (sweep.base[name].script in POLICY_SCRIPTS) == policies

    base = folders_of(sweep, seed, None)
    found = [base[name] for name, stage in sweep.base.items() if stage.outcomes and is_wanted(name)]
    for variant in sweep.variants:
        if is_wanted(variant.judged):
            found.append(folders_of(sweep, seed, variant)[variant.judged])
    return found


def training_minutes(sweep: Sweep) -> float:
    """Minutes of all training runs, as they recorded them."""
    return sum(run_cost(run_dir).get("elapsed_minutes", 0.0) for run_dir in run_dirs(sweep))


def run_dirs(sweep: Sweep) -> list[Path]:
    """The folders of all training runs."""
    return [stage.output_dir for seed in sweep.seeds for stage, _ in training(sweep, seed)]
