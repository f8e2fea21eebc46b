"""The file that describes a sweep: a base chain of stages, and variants of it, one line each.

    seeds: [0, 1, 2]
    output_dir: output/ablations/demo
    base:                       # the chain, in order
      sft: {script: train_sft.py, config: assets/recipes/demo/sft.yaml}
      reward:
        script: train_reward.py
        config: assets/recipes/demo/reward.yaml
        flags: {model_name_or_path: "{sft}/model"}      # {sft}: the folder of that stage's run
        outcomes: [accuracy]                            # what its variants are judged by
    evaluation: {config: assets/recipes/demo/evaluate.yaml, reference: sft, judge: reward}
    variants:
      - {detail: Reward head, choice: zeros, stage: reward, flags: {head_init: zeros}}

A variant is its stage with more flags, or with a patch (`patched.py`). With `compared_with: grpo`
every judged run, the base's stages too, is compared with that stage of the base, not with its own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from common.config.recipes import read_recipe
from common.errors import UserError
from experiments.runs.stages import Stage, moved

Entry = TypeVar("Entry")
AS_IS = "as in the recipe"  # the choice of a run of the base chain


@dataclass(frozen=True)
class Base:
    """A stage of the base chain."""

    script: str
    config: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    outcomes: Sequence[str] = ()


@dataclass(frozen=True)
class Evaluation:
    """The flags of evaluate.py, by which all runs of a seed are judged."""

    config: str
    reference: str  # the stage of the base chain to which the KL is measured
    judge: str = ""  # the stage of the base chain whose reward model scores generations, if any
    flags: Mapping[str, Any] = field(default_factory=dict)
    policy_flags: Mapping[str, Any] = field(default_factory=dict)  # where policies are judged


@dataclass(frozen=True)
class Variant:
    """A line of the sweep."""

    detail: str
    choice: str
    stage: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    patch: str = ""
    num_processes: int = 1

    @property
    def slug(self) -> str:
        """Name of its folder."""
        words = f"{self.stage} {self.detail} {self.choice}".lower()
        return re.sub(r"[^a-z0-9]+", "_", words).strip("_")


@dataclass(frozen=True)
class Sweep:
    """A whole file, and the runs that it asks for."""

    seeds: Sequence[int]
    output_dir: str
    base: Mapping[str, Base]
    evaluation: Evaluation
    variants: Sequence[Variant]
    title: str = "Ablations"
    compared_with: str = ""  # a stage of the base chain; empty: each variant with its own stage

    def runs(self) -> dict[str, Variant]:
        """The base chain as it is, and the variants, by the names of their runs."""
        base = {stage: Variant(stage, AS_IS, stage) for stage in self.base}
        return base | {line.slug: line for line in self.variants}

    def folders(self, seed: int) -> dict[str, Path]:
        """The folder of each run."""
        root, parents = Path(self.output_dir) / f"seed_{seed}", dict.fromkeys(self.base, "base")
        return {run: root / parents.get(run, run) / line.stage for run, line in self.runs().items()}

    def training(self, seed: int) -> Iterator[Stage]:
        """Every training run of a seed, the base chain first."""
        folders = self.folders(seed)
        for run, line in self.runs().items():
            base, patch = self.base[line.stage], Path(line.patch) if line.patch else None
            flags = {"seed": seed, **filled_in({**base.flags, **line.flags}, folders)}
            config, processes = Path(base.config), line.num_processes
            yield Stage(base.script, folders[run], config, flags, patch, processes)

    def evaluations(self, seed: int) -> Iterator[Stage]:
        """The two runs of evaluate.py that judge a seed: of policies, and of reward models."""
        judging, folders = self.evaluation, self.folders(seed)
        policies: list[str] = []
        models: list[str] = []
        for run, line in self.runs().items():
            if self.base[line.stage].outcomes:
                is_model = self.base[line.stage].script == "train_reward.py"
                (models if is_model else policies).append(f"{folders[run]}/model")
        flags = {"seed": seed, **filled_in(judging.flags, folders)}
        config, root = Path(judging.config), Path(self.output_dir) / f"seed_{seed}" / "evaluation"
        if policies:
            of_policies = {
                **filled_in(judging.policy_flags, folders),
                "policies": policies,
                "ref_model_name_or_path": f"{folders[judging.reference]}/model",
                "reward_models": [f"{folders[judging.judge]}/model"] if judging.judge else [],
            }
            yield Stage("evaluate.py", root / "policies", config, flags | of_policies)
        if models:
            of_models = {"policies": [], "reward_models": models, "reward_funcs": []}
            judged_alone = flags | of_models | {"num_prompts": 0}
            yield Stage("evaluate.py", root / "reward_models", config, judged_alone)


def filled_in(flags: Mapping[str, Any], folders: Mapping[str, Path]) -> dict[str, Any]:
    """The flags with a `{stage}` at a value's beginning replaced by that stage's folder."""
    by_placeholder = {f"{{{name}}}": folder for name, folder in folders.items()}
    filled = {name: moved(value, by_placeholder) for name, value in flags.items()}
    for value in filled.values():
        for text in value if isinstance(value, list) else [value]:
            if re.match(r"\{[A-Za-z]\w*\}", str(text)):
                raise UserError(f"{text} in the flags must begin with one of {[*by_placeholder]}.")
    return filled


# ---- reading -------------------------------------------------------------------------------------


def read_sweep(path: str, **changes: Any) -> Sweep:
    """The sweep that a file describes, with other seeds or another folder in `changes`."""
    where = f"--config {path}"
    top = entry(Sweep, read_recipe(path, typed=True), where)
    variants: Sequence[Any] = top.variants
    sweep = replace(
        top,
        base={name: entry(Base, v, f"{where}, base.{name}") for name, v in top.base.items()},
        evaluation=entry(Evaluation, top.evaluation, f"{where}, evaluation"),
        variants=[entry(Variant, v, f"{where}, variants[{i}]") for i, v in enumerate(variants)],
        **changes,
    )
    judged = [name for name, stage in sweep.base.items() if stage.outcomes]
    named = [("evaluation.reference", sweep.evaluation.reference, list(sweep.base))]
    named.append(("evaluation.judge", sweep.evaluation.judge, [*sweep.base, ""]))
    named.append(("compared_with", sweep.compared_with, [*judged, ""]))
    named += [(f"stage of variant {v.choice!r}", v.stage, judged) for v in sweep.variants]
    for key, name, choices in named:
        if name not in choices:
            allowed = ", ".join(filter(None, choices))
            raise UserError(f"{where} has the {key} {name!r}; it must be one of {allowed}.")
    slugs = [variant.slug for variant in sweep.variants]
    for key, names in (("seeds", sweep.seeds), ("variants", slugs)):
        if len(set(names)) < len(names):
            raise UserError(f"{where} has the {key} {names}; each must be there once.")
    return sweep


def entry(cls: type[Entry], values: Any, where: str) -> Entry:
    """A mapping of a file as a dataclass; a UserError for an unknown or a missing key."""
    try:
        return cls(**values)
    except TypeError as error:
        keys = ", ".join(f.name for f in fields(cls))  # type: ignore[arg-type]
        raise UserError(f"{where}: {error} (the keys are {keys}).") from None
