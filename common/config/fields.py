"""A field of a config: its default, its help text, and the values that it may take."""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UserError

REPORT_TO = ("none", "wandb", "tensorboard")
AUTO = "auto"
SMALLEST_TEMPERATURE = 1e-6  # logits are divided by it
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # see `operator`


def flag(
    default: Any,
    description: str,
    choices: Sequence[Any] | None = None,
    *,
    required: bool = False,
    is_path: bool = False,
    may_change: bool = False,
    **bounds: float,
) -> Any:
    """A dataclass field with its help text and what `check_fields` holds its values to.

    Args:
        default: A list is copied. A whole number makes the field a count: 0 or more.
        description: The help text.
        choices: The values it may take, of a list each item.
        required: It must not be empty.
        is_path: It may name files and folders; a slash at the end is dropped.
        may_change: A run may be resumed with another value; else that makes it another run.
        bounds: `gt`, `ge`, `lt`, `le`.
    """
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
        return f"one of {choices}"
    if not all(getattr(operator, name)(value, bound) for name, bound in bounds.items()):
        return " and ".join(f"{WORDS[name]} {bound:,}" for name, bound in bounds.items())
    return ""
