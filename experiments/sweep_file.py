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
stages that are made again on top of it, and the last of them is judged. With `compared_with: grpo`
every judged run, the base's stages too, is set beside that stage of the base, not beside its own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError, hint
from common.flags.recipes import read_recipe
from experiments.stages import Stage

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
    def stages(self) -> list[str]:
        """The stages that it makes, of which the last is judged."""
        return [self.stage, *self.then]


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

    def folders(self, seed: int, variant: Variant | None = None) -> dict[str, Path]:
        """The folder of each stage as a variant sees it: its own where it makes the stage again."""
        root, again = Path(self.output_dir) / f"seed_{seed}", variant.stages if variant else []
        slug = variant.slug if variant else ""
        return {name: root / (slug if name in again else "base") / name for name in self.base}

    def training(self, seed: int) -> Iterator[tuple[Stage, int]]:
        """Every training run of a seed and its number of processes, the base chain first."""
        for variant in (None, *self.variants):
            folders = self.folders(seed, variant)
            for name in variant.stages if variant else self.base:
                base, num_processes, patch = self.base[name], 1, None
                flags = {"seed": seed, **filled_in(base.flags, folders)}
                if variant and name == variant.stage:
                    flags |= filled_in(variant.flags, folders)
                    num_processes = variant.num_processes
                    patch = Path(variant.patch) if variant.patch else None
                run = Stage(base.script, folders[name], Path(base.config), flags, patch)
                yield run, num_processes

    def evaluations(self, seed: int) -> Iterator[Stage]:
        """The two runs of evaluate.py that judge a seed: of policies, and of reward models."""
        judging, base = self.evaluation, self.folders(seed)
        judged = [(name, base[name]) for name, stage in self.base.items() if stage.outcomes]
        judged += [(v.stages[-1], self.folders(seed, v)[v.stages[-1]]) for v in self.variants]
        paths: dict[bool, list[str]] = {True: [], False: []}  # of policies, of reward models
        for name, run_dir in judged:
            paths[self.base[name].script in POLICY_SCRIPTS].append(f"{run_dir}/model")
        flags = {"seed": seed, **filled_in(judging.flags, base)}
        config, root = Path(judging.config), Path(self.output_dir) / f"seed_{seed}" / "evaluation"
        if paths[True]:
            own = {
                **filled_in(judging.policy_flags, base),
                "policies": paths[True],
                "ref_model_name_or_path": f"{base[judging.reference]}/model",
                "reward_models": [f"{base[judging.judge]}/model"] if judging.judge else [],
            }
            yield Stage("evaluate.py", root / "policies", config, flags | own)
        if paths[False]:
            own = {"policies": [], "reward_models": paths[False], "reward_funcs": []}
            own |= {"num_prompts": 0}
            yield Stage("evaluate.py", root / "reward_models", config, flags | own)


def filled_in(flags: Mapping[str, Any], folders: Mapping[str, Path]) -> dict[str, Any]:
    """The flags with every `{stage}` replaced by that stage's folder."""

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, str):
            return PLACEHOLDER.sub(lambda match: str(folders[match[1]]), value)
        return value

    return {name: fill(value) for name, value in flags.items()}


# ---- reading -------------------------------------------------------------------------------------


def read_sweep(path: str) -> Sweep:
    """The sweep that a file describes.

    Raises:
        UserError: it cannot be read, or says something that cannot be.
    """
    where = f"--config {path}"
    top = entry(Sweep, read_recipe(path, typed=True), where)
    for key, kind in (("base", dict), ("variants", list), ("seeds", list)):
        if not isinstance(getattr(top, key), kind):
            raise UserError(f"{where} has a {key!r} of the wrong form; see sweep_file.py.")
    variants: Sequence[Any] = top.variants
    sweep = replace(
        top,
        output_dir=str(top.output_dir),
        title=str(top.title),
        base={str(n): entry(Base, v, f"{where}, base.{n},") for n, v in top.base.items()},
        evaluation=entry(Evaluation, top.evaluation, f"{where}, evaluation,"),
        variants=[entry(Variant, v, f"{where}, variants[{i}],") for i, v in enumerate(variants)],
    )
    if {type(seed) for seed in sweep.seeds} != {int} or len(set(sweep.seeds)) < len(sweep.seeds):
        raise UserError(f"{where} has the seeds {sweep.seeds}; they must be distinct integers.")
    refuse_names(sweep, where)
    refuse_placeholders(sweep, where)
    slugs = [variant.slug for variant in sweep.variants]
    for variant in sweep.variants:
        last = variant.stages[-1]
        reasons = {
            f"ends with {last}, which has no outcomes; give base.{last} some, or the variant a "
            "later stage in `then`": not sweep.base[last].outcomes,
            "is there twice; give it another detail or choice": slugs.count(variant.slug) > 1,
            f"has the patch {variant.patch}, which is no file": (
                variant.patch and not Path(variant.patch).is_file()
            ),
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise UserError(f"{where}, variant {variant.choice!r}, {reason}.")
    return sweep


def entry(cls: type[Entry], values: Any, where: str) -> Entry:
    """A mapping of a file as a dataclass.

    Raises:
        UserError: a key is unknown or missing, or there is no mapping.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where} is {values!r}; it must hold `key: value` lines.")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            otherwise = f"the keys are {', '.join(known)}"
            raise UserError(f"{where} has the unknown key {key!r} ({hint(key, known, otherwise)}).")
    for name, f in known.items():
        if f.default is MISSING and f.default_factory is MISSING and name not in values:
            raise UserError(f"{where} lacks the key {name!r}.")
    return cls(**values)


def refuse_names(sweep: Sweep, where: str) -> None:
    """Raise a UserError for a script or a stage that there is not."""
    names, judging = list(sweep.base), sweep.evaluation
    given: list[tuple[str, str, Sequence[str]]] = [
        (f"base.{name}, has the script", stage.script, SCRIPTS)
        for name, stage in sweep.base.items()
    ]
    given.append(("evaluation, has the reference", judging.reference, names))
    given.append(("evaluation, has the judge", judging.judge, [*names, ""]))
    judged = [name for name, stage in sweep.base.items() if stage.outcomes]
    given.append(("compared_with, names", sweep.compared_with, [*judged, ""]))
    for variant in sweep.variants:
        given += [(f"variant {variant.choice!r}, names", n, names) for n in variant.stages]
    for what, name, known in given:
        if name not in known:
            allowed = ", ".join(filter(None, known))
            raise UserError(f"{where}, {what} {name!r}; it must be one of {allowed}.")


def refuse_placeholders(sweep: Sweep, where: str) -> None:
    """Raise a UserError for flags that name the folder of a stage which does not come before."""
    names, judging = list(sweep.base), sweep.evaluation
    given = [(f"base.{n}", stage.flags, n) for n, stage in sweep.base.items()]
    given += [(f"variant {v.choice!r}", v.flags, v.stage) for v in sweep.variants]
    given += [("evaluation", flags, "") for flags in (judging.flags, judging.policy_flags)]
    for what, flags, stage in given:
        if not isinstance(flags, dict):
            what = f"{where}, {what}, has the flags {flags!r}"
            raise UserError(f"{what}; they must be `flag: value` lines.")
        known = names[: names.index(stage)] if stage else names
        for name in PLACEHOLDER.findall(str(list(flags.values()))):
            if name not in known:
                raise UserError(
                    f"{where}, {what}, names the folder {{{name}}}; it must be of an earlier stage "
                    f"({', '.join(known) or 'there is none'})."
                )
