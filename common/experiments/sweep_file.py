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

A variant is its stage with more flags, or with a patch (`patched.py`); `then` names later
stages that are made again on top of it, and the last of them is judged.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from common.config import UserError, read_recipe
from common.errors import hint

Entry = TypeVar("Entry")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
POLICY_SCRIPTS = ("train_sft.py", "train_dpo.py", "train_grpo.py")
SCRIPTS = (*POLICY_SCRIPTS, "train_reward.py")


@dataclass(frozen=True)
class Base:
    """A stage of the base chain."""

    script: str
    config: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    outcomes: Sequence[str] = ()


@dataclass(frozen=True)
class Evaluation:
    """How all runs of a seed are judged, by evaluate.py."""

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
    then: Sequence[str] = ()
    num_processes: int = 1

    @property
    def slug(self) -> str:
        """Name of its folder."""
        words = f"{self.stage} {self.detail} {self.choice}".lower()
        return re.sub(r"[^a-z0-9]+", "_", words).strip("_")

    @property
    def judged(self) -> str:
        """The stage whose run is judged."""
        return [self.stage, *self.then][-1]


@dataclass(frozen=True)
class Sweep:
    """A whole file."""

    seeds: Sequence[int]
    output_dir: str
    base: Mapping[str, Base]
    evaluation: Evaluation
    variants: Sequence[Variant]
    title: str = "Ablations"


def read_sweep(path: str) -> Sweep:
    """The sweep that a file describes.

    Raises:
        UserError: it cannot be read, or says something that cannot be.
    """
    top = entry(Sweep, read_recipe(path, typed=True), path, "")
    for key, kind in (("base", dict), ("variants", list), ("seeds", list), ("evaluation", dict)):
        if not isinstance(getattr(top, key), kind):
            raise UserError(f"--config {path} has a {key!r} of the wrong form; see sweep_file.py.")
    sweep = Sweep(
        seeds=list(top.seeds),
        output_dir=str(top.output_dir),
        base={str(n): entry(Base, v, path, f"base.{n}") for n, v in dict(top.base).items()},
        evaluation=entry(Evaluation, top.evaluation, path, "evaluation"),
        variants=[
            entry(Variant, v, path, f"variants[{i}]") for i, v in enumerate(list(top.variants))
        ],
        title=str(top.title),
    )
    refuse_seeds(sweep, path)
    refuse_base(sweep, path)
    refuse_variants(sweep, path)
    return sweep


def entry(cls: type[Entry], values: Any, path: str, place: str) -> Entry:
    """A mapping of the file as one of the classes above.

    Raises:
        UserError: a key is unknown or missing, or there is no mapping.
    """
    where = f"--config {path}" + (f", {place}," if place else "")
    if not isinstance(values, dict):
        raise UserError(f"{where} is {values!r}; it must hold `key: value` lines.")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            otherwise = f"the keys are {', '.join(known)}"
            raise UserError(f"{where} has the unknown key {key!r} ({hint(key, known, otherwise)}).")
    for name, f in known.items():
        is_needed = f.default is MISSING and f.default_factory is MISSING
        if is_needed and name not in values:
            raise UserError(f"{where} lacks the key {name!r}.")
    return cls(**values)


def refuse_seeds(sweep: Sweep, path: str) -> None:
    """Raise a UserError for seeds that are none, or are there twice."""
    seeds = list(sweep.seeds)
    if not seeds or len(set(seeds)) < len(seeds) or any(type(seed) is not int for seed in seeds):
        raise UserError(f"--config {path} has the seeds {seeds}; they must be distinct integers.")


def refuse_base(sweep: Sweep, path: str) -> None:
    """Raise a UserError for a chain that refers to what does not come before."""
    earlier: list[str] = []
    for name, stage in sweep.base.items():
        if stage.script not in SCRIPTS:
            raise UserError(
                f"--config {path}, base.{name}, has the script {stage.script!r}; it must be one of "
                f"{', '.join(SCRIPTS)}."
            )
        refuse_placeholders(stage.flags, earlier, f"--config {path}, base.{name},")
        earlier.append(name)
    for key in ("reference", "judge"):
        name = getattr(sweep.evaluation, key)
        if name not in sweep.base and (key, name) != ("judge", ""):
            raise UserError(
                f"--config {path}, evaluation, has the {key} {name!r}; it must be one of "
                f"{', '.join(sweep.base)}."
            )


def refuse_variants(sweep: Sweep, path: str) -> None:
    """Raise a UserError for a variant of no stage, without a judgement, or the same as another."""
    names = list(sweep.base)
    slugs: dict[str, Variant] = {}
    for variant in sweep.variants:
        where = f"--config {path}, variant {variant.choice!r},"
        for name in (variant.stage, *variant.then):
            if name not in names:
                raise UserError(f"{where} names {name!r}; it must be one of {', '.join(names)}.")
        if not sweep.base[variant.judged].outcomes:
            raise UserError(
                f"{where} ends with {variant.judged}, which has no outcomes; give base."
                f"{variant.judged} some, or the variant a later stage in `then`."
            )
        if variant.slug in slugs:
            raise UserError(f"{where} is there twice; give it another detail or choice.")
        if variant.patch and not Path(variant.patch).is_file():
            raise UserError(f"{where} has the patch {variant.patch}, which is no file.")
        refuse_placeholders(variant.flags, names[: names.index(variant.stage)], where)
        slugs[variant.slug] = variant


def refuse_placeholders(flags: Any, known: Sequence[str], where: str) -> None:
    """Raise a UserError where the flags name the folder of another stage than the known ones."""
    if not isinstance(flags, dict):
        raise UserError(f"{where} has the flags {flags!r}; they must be `flag: value` lines.")
    for value in flags.values():
        for text in value if isinstance(value, list) else [value]:
            for name in PLACEHOLDER.findall(str(text)):
                if name not in known:
                    raise UserError(
                        f"{where} names the folder {{{name}}}; it must be of an earlier stage "
                        f"({', '.join(known) or 'there is none'})."
                    )


def filled_in(flags: Mapping[str, Any], folders: Mapping[str, Path]) -> dict[str, Any]:
    """The flags with every `{stage}` replaced by that stage's folder."""

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, str):
            return PLACEHOLDER.sub(lambda match: str(folders[match[1]]), value)
        return value

    return {name: fill(value) for name, value in flags.items()}
