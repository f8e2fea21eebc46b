"""Values of a YAML file as dataclasses, each of its field's type, or a sentence with its key."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from common.errors import UserError, hint

SCALARS: dict[Any, Any] = {  # with switches, which are numbers too
    str: (str | int | float, "a text or a finite number"),
    float: (int | float, "a finite number"),
}


def built(kind: Any, value: Any, file: str, key: str = "") -> Any:
    """A value as a dataclass, a mapping, a list, a number or a text, and so are those inside.

    Args:
        kind: a dataclass, `Mapping[str, X]`, `Sequence[X]`, `int`, `float`, `str` (of any scalar),
            each with `| None` or without, or `Any`, which is a scalar or a list of them.
        value: as YAML reads it.
        file: where it is from, for the sentence.
        key: where it is in the file, as `base.sft.flags`.

    Raises:
        UserError: for an unknown or a missing key, and a value of another type.
    """
    if NoneType in get_args(kind):
        return None if value is None else built(get_args(kind)[0], value, file, key)
    if is_dataclass(kind):
        return entry(kind, mapping(value, file, key), file, key)
    if get_origin(kind) is Mapping:
        of_values, items = get_args(kind)[1], mapping(value, file, key).items()
        return {name: built(of_values, inner, file, f"{key}.{name}") for name, inner in items}
    if get_origin(kind) is Sequence or (kind is Any and isinstance(value, list)):
        if not isinstance(value, list):
            raise refused(value, "a list, in [square brackets]", file, key)
        of_items = get_args(kind)[0] if kind is not Any else object
        return [built(of_items, item, file, f"{key}[{i}]") for i, item in enumerate(value)]
    if kind is int and (type(value) is not int or value < 0):
        raise refused(value, "a whole number, 0 or more", file, key)
    allowed, needed = SCALARS.get(kind, SCALARS[str])
    if not isinstance(value, allowed) or (isinstance(value, float) and not math.isfinite(value)):
        raise refused(value, needed, file, key)
    return str(value) if kind is str else value


def entry(cls: Any, values: Mapping[str, Any], file: str, key: str) -> Any:
    """A mapping of a file as a dataclass, whose fields without a default it must have."""
    kinds, known = get_type_hints(cls), [field.name for field in fields(cls)]
    where = f"{file}, {key}" if key else file
    for name in values:
        if name not in known:
            keys = f"{hint(name, known, '')} the keys are {', '.join(known)}".lstrip()
            raise UserError(f"{where} has the unknown key {name!r} ({keys}).")
    needed = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise UserError(f"{where} lacks {', '.join(missing)}; each must be there.")
    names = {name: f"{key}.{name}".lstrip(".") for name in values}
    return cls(**{n: built(kinds[n], value, file, names[n]) for n, value in values.items()})


def mapping(value: Any, file: str, key: str) -> Mapping[str, Any]:
    """A mapping whose keys are texts."""
    if not isinstance(value, dict):
        raise refused(value, "`key: value` lines", file, key)
    for name in value:
        if not isinstance(name, str):
            raise UserError(f"{file}, {key} has the key {name}; it must be a text, in quotes.")
    return value


def refused(value: Any, needed: str, file: str, key: str) -> UserError:
    """The error for a value of another type."""
    shown = repr(value) if isinstance(value, str) else "empty" if value is None else value
    return UserError(f"{file}, {key} is {shown}; it must be {needed}.")
