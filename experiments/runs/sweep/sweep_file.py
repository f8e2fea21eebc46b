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
Reference and judge may also be folders of finished models, as output/sft/model.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.config.recipes import read_recipe
from common.errors import UserError
from experiments.runs.stages import CHAIN, Stage, moved
from experiments.runs.sweep.typed import built

AS_IS = "as in the recipe"  # the choice of a run of the base chain
BASE, EVALUATION = "base", "evaluation"  # folders of a seed that are no variant's
LONGEST_SLUG = 200  # characters; a file system takes names of 255 bytes


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
    # Each a stage of the base chain, or the folder of a finished model
    reference: str  # the policy to which the KL is measured
    judge: str = ""  # the reward model that scores generations, if any
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
    def words(self) -> tuple[str, str, str]:
        """What distinguishes it from other variants."""
        return self.stage, self.detail, self.choice


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
        names = run_names([line.words for line in self.variants], {*base, BASE, EVALUATION})
        return base | dict(zip(names, self.variants, strict=True))

    def folders(self, seed: int) -> dict[str, Path]:
        """The folder of each run."""
        root, parents = Path(self.output_dir) / f"seed_{seed}", dict.fromkeys(self.base, BASE)
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
        config, root = Path(judging.config), Path(self.output_dir) / f"seed_{seed}" / EVALUATION
        if policies:
            models_of = {stage: f"{folders[stage]}/model" for stage in self.base}
            reference, judge = (models_of.get(n, n) for n in (judging.reference, judging.judge))
            of_policies = {
                **filled_in(judging.policy_flags, folders),
                "policies": policies,
                "ref_model_name_or_path": reference,
                "reward_models": [judge] if judge else [],
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


def run_names(variants: Iterable[Sequence[str]], taken: set[str]) -> list[str]:
    """Names of folders, from the words of each variant: their letters a-z and digits.

    Where these do not distinguish it, a name ends with a digest of the words: of other letters and
    signs than ASCII's, and where a variant before it or something in `taken` has the name.
    """
    names: list[str] = []
    for words in variants:
        text = " ".join(words)
        slug = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
        is_whole = text.isascii() and len(slug) <= LONGEST_SLUG
        if not is_whole or slug in {*taken, *names}:
            digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]
            slug = f"{slug[:LONGEST_SLUG]}_{digest}"
        names.append(slug)
    return names


# ---- reading -------------------------------------------------------------------------------------


def read_sweep(path: str, **changes: Any) -> Sweep:
    """The sweep that a file describes, with other seeds or another folder in `changes`."""
    where = f"--config {path}"
    sweep: Sweep = replace(built(Sweep, read_recipe(path, typed=True), where), **changes)
    for key in ("seeds", "base"):
        if not getattr(sweep, key):
            raise UserError(f"{where} has no {key}; it must have at least one.")
    refuse_names_of_no_folder(sweep.base, where)
    refuse_unknown(sweep, where)
    each: dict[str, list[Any]] = {"seeds": list(sweep.seeds)}
    each["variants"] = [variant.words for variant in sweep.variants]
    for key, names in each.items():
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{where} has the {key} {repeated}; each must be there once.")
    return sweep


def refuse_names_of_no_folder(stages: Iterable[str], where: str) -> None:
    """Refuse stages whose names can be no folders, or on some file systems one folder only."""
    lower: dict[str, str] = {}
    for name in stages:
        if Path(name).name != name or name == "..":
            raise UserError(f"{where} has the stage {name!r}; its name must be that of a folder.")
        if (other := lower.setdefault(name.casefold(), name)) != name:
            text = "they must differ by more than capital letters"
            raise UserError(f"{where} has the stages {other!r} and {name!r}; {text}.")


def refuse_unknown(sweep: Sweep, where: str) -> None:
    """Refuse what names no stage, script, file or model, and numbers that cannot be."""
    judged = [name for name, stage in sweep.base.items() if stage.outcomes]
    scripts = list(dict.fromkeys(CHAIN.values()))
    stages, folders = list(sweep.base), "the folder of a finished model"
    named = [(f"script of {n}", base.script, scripts, "") for n, base in sweep.base.items()]
    named.append(("evaluation.reference", sweep.evaluation.reference, stages, folders))
    named.append(("evaluation.judge", sweep.evaluation.judge, [*stages, ""], folders))
    named.append(("compared_with", sweep.compared_with, [*judged, ""], ""))
    named += [(f"stage of variant {v.choice!r}", v.stage, judged, "") for v in sweep.variants]
    for key, name, choices, other in named:
        if name not in choices and not (other and is_model(name)):
            allowed = " or ".join(filter(None, [", ".join(filter(None, choices)), other]))
            raise UserError(f"{where} has the {key} {name!r}; it must be one of {allowed}.")
    for variant in sweep.variants:
        if variant.num_processes < 1:
            number = f"num_processes {variant.num_processes} of variant {variant.choice!r}"
            raise UserError(f"{where} has the {number}; it must be above 0.")


def is_model(path: str) -> bool:
    """Whether a path is the folder of a model that is there."""
    return (Path(path).expanduser() / "config.json").is_file()
