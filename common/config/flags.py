"""Flags: a field with its default, its help text and the values it may take; groups of them.

A group is of some stages, or of a command too; `stages.py` has the other flags. A class variable
with a leading underscore is the heading in `--help` of the fields behind it. The last base of a
class comes first there.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from common.errors import UserError, hint

AUTO = "auto"
SMALLEST_TEMPERATURE = 1e-6  # logits are divided by it
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # see `operator`
OPTIMISATION = "optimisation"
WATCHING = "logging, evaluation, checkpoints"
LORA = "LoRA"
SPEED = "speed, memory and sharding: none but bf16 changes a loss"
ENGINE = "what samples (docs/rollout_engine.md)"
CHECKS = "checks"
FIRST = ("what", "data", "model")  # headings in --help; the others follow, and at the end the last
LAST = (OPTIMISATION, WATCHING, LORA, SPEED, ENGINE, CHECKS)


def flag(
    default: Any,  # a list is copied; a whole number makes the field a count: 0 or more
    description: str,  # in --help
    choices: Sequence[Any] | None = None,  # of a list, for each item
    *,
    required: bool = False,  # it must not be empty
    is_path: bool = False,  # it may name files and folders; a slash at the end is dropped
    may_change: bool = False,  # a run may be resumed with another value; else it is another run
    **bounds: float,  # `gt`, `ge`, `lt`, `le`
) -> Any:
    """A dataclass field with its help text and what `check_fields` holds its values to."""
    if type(default) is int and not bounds.keys() & {"gt", "ge"}:
        bounds = {"ge": 0, **bounds}
    about = {"default": default, "help": description, "choices": choices and list(choices)}
    about |= {"bounds": bounds, "required": required, "is_path": is_path, "may_change": may_change}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=about)
    return dataclasses.field(default=default, metadata=about)


# A field that changes how a run is watched, stored and computed, but for rounding not what.
free_flag = functools.partial(flag, may_change=True)
path_flag = functools.partial(flag, is_path=True)


def values_of(config: Any, f: dataclasses.Field) -> list[Any]:
    """A field's value, or the items of its list."""
    value = getattr(config, f.name)
    return value if isinstance(value, list) else [value]


def check_fields(config: Any) -> None:
    """Raise a UserError for a value that its field excludes by itself.

    A path loses the slash at its end: `model/` is the same folder as `model`.
    """
    for f in dataclasses.fields(config):
        if isinstance(f.metadata["default"], list):  # from Python one item may stand for its list
            setattr(config, f.name, [*values_of(config, f)])
        value = getattr(config, f.name)
        if f.metadata["required"] and not value:
            raise UserError(f"--{f.name} is required: {f.metadata['help']}.")
        for item in values_of(config, f):
            if needed := missed(item, **f.metadata):
                raise UserError(f"--{f.name} is {item!r}; it must be {needed}.")
        if f.metadata["is_path"]:
            paths = [path.rstrip("/") or path for path in values_of(config, f)]
            setattr(config, f.name, paths if isinstance(value, list) else paths[0])


def missed(value: Any, choices: Sequence[Any] | None, bounds: Mapping[str, float], **_: Any) -> str:
    """The requirement that a value misses; empty if it meets all."""
    if choices and value not in choices:
        guess = hint(str(value), map(str, choices), "")
        return f"one of {choices}" + f" ({guess})" * bool(guess)
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if not all(getattr(operator, name)(value, bound) for name, bound in bounds.items()):
        return " and ".join(f"{WORDS[name]} {bound:,}" for name, bound in bounds.items())
    return ""


# ---- groups of flags -----------------------------------------------------------------------------


@dataclass
class OutputFlags:
    """The output folder."""

    _what: ClassVar = "what"
    output_dir: str = free_flag("", "folder this run writes to", required=True, is_path=True)

    def __post_init__(self) -> None:
        """Refuse values that a field excludes by itself."""
        check_fields(self)

    def refused(self, name: str, needed: str) -> UserError:
        """The error for a value that those of other fields exclude."""
        value = getattr(self, name)
        value = str(value).lower() if isinstance(value, bool) else value
        return UserError(f"--{name} is {value}; it must be {needed}.")


@dataclass
class ModelFlags(OutputFlags):
    """The source of a model."""

    # Of commands without the flag
    seed = 0
    lora_r = 0

    _model: ClassVar = "model"
    model_name_or_path: str = path_flag("", "hub id, folder, or config .json (random weights)")
    model_revision: str = flag("main", "branch, tag or commit of model_name_or_path on the hub")
    trust_remote_code: bool = free_flag(False, "run Python code that comes with a model folder")


@dataclass
class CompletionFlags(OutputFlags):
    """A condition on the completions of a data set."""

    _data: ClassVar = "data"
    require_stop_token: bool = free_flag(
        True, "refuse completions that are all cut before their stop token (false: by design)"
    )


@dataclass
class FrozenFlags(OutputFlags):
    """Placement of models that are not trained."""

    _speed: ClassVar = SPEED
    offload_frozen: bool = free_flag(
        False, "keep reference and reward models in host memory; plans count them on the GPU"
    )


@dataclass
class SampleTableFlags(OutputFlags):
    """The table of samples."""

    _logging: ClassVar = WATCHING
    sample_steps: int = free_flag(0, "steps between printed samples (0: at the end only)")
