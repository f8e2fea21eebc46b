"""Functions of objectives by name or file, with their settings."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from common.errors import UserError, hint
from common.objectives.user_files import load_from_file, module_of

load_once = functools.cache(load_from_file)  # a run goes on if the file is moved
TYPES = (bool, int, float, str)  # of settings


@dataclass(frozen=True)
class Function:
    """A function of an objective with its settings; `kinds.call` calls it."""

    flag: str  # that names it
    name: str
    function: Callable[..., Any]
    inputs: Sequence[str]  # what it takes, by name
    settings: dict[str, Any]
    constants: Mapping[str, Any]  # of its file

    @property
    def is_built_in(self) -> bool:
        """Whether it is no user's."""
        return ".py" not in self.name


@dataclass(frozen=True)
class Objective:
    """The functions that a flag names; a class for each kind, see `kinds.py`."""

    flag: ClassVar[str]
    folder: ClassVar[str]  # of the built-in files, in `common/objectives`
    inputs: ClassVar[Sequence[str]]  # what a function may take
    flags: ClassVar[Sequence[str]] = ()  # settings that are flags of the stage
    optional: ClassVar[Sequence[str]] = ()  # of these, those that no function need have
    functions: Sequence[Function]

    @classmethod
    def built_in(cls) -> list[str]:
        """Names of the built-in files."""
        return sorted(f.stem for f in Path(__file__).with_name(cls.folder).glob("[!_]*.py"))

    @classmethod
    def find(
        cls,
        names: Sequence[str],
        arguments: Sequence[str] = (),
        others: Sequence[str] = (),  # settings of another objective, which also has the arguments
        **settings: Any,
    ) -> Self:
        """The functions of these built-in files, or of a user's files, which are run.

        Settings are given by name, or as `--objective_args` has them, and reach every function that
        has them. Raises a UserError for one that no function has, or if there is no such function.
        """
        objective = cls([cls.function_of(name) for name in names])
        texts = dict(text.partition("=")[::2] for text in arguments)
        known = [name for function in objective.functions for name in function.settings]
        for chosen, allowed in (([*settings], known), ([*texts], [*known, *others])):
            if unknown := [name for name in chosen if name not in (*allowed, *cls.optional)]:
                choice = ", ".join(dict.fromkeys(allowed)) or "none"
                raise objective.refused(f"has no setting {unknown[0]!r}; its settings are {choice}")
        if as_flags := [name for name in texts if name in cls.flags]:
            raise UserError(f"--objective_args has {as_flags[0]}; give it as --{as_flags[0]}.")
        for function in objective.functions:
            values = function.settings
            values |= {name: settings[name] for name in settings if name in values}
            for setting in texts.keys() & values.keys():
                values[setting] = parsed(setting, texts[setting], values[setting])
        return objective

    @classmethod
    def function_of(cls, name: str) -> Function:
        """The function of that name, with its defaults."""
        if name in (built_in := cls.built_in()):
            constants = vars(import_module(f"common.objectives.{cls.folder}.{name}"))
            function = constants[name]
        elif ".py" in name:
            function = load_once(name, f"--{cls.flag}")
            constants = vars(module_of(Path(name.rpartition(":")[0]).expanduser()))
        else:
            choice = f"file.py:function, or one of {', '.join(built_in)} ({hint(name, built_in)})"
            raise UserError(f"--{cls.flag} is {name!r}; it must be {choice}.")
        parameters = inspect.signature(function).parameters.values()
        settable = [p for p in parameters if p.kind is p.KEYWORD_ONLY and type(p.default) in TYPES]
        defaults = {p.name: p.default for p in settable}
        inputs = [p.name for p in parameters if p.name not in defaults]
        if wrong := [each for each in inputs if each not in cls.inputs]:
            choice = ", ".join(cls.inputs)
            settings = "settings behind a * with a bool, number or text as default"
            taken = f"takes {', '.join(wrong)}; it may take {choice} and {settings}"
            raise UserError(f"--{cls.flag} {name} {taken}; see docs/objectives.md.")
        return Function(cls.flag, name, function, inputs, defaults, constants)

    @property
    def is_built_in(self) -> bool:
        """Whether no function is a user's."""
        return all(function.is_built_in for function in self.functions)

    @property
    def names(self) -> str:
        """The functions as the flag has them."""
        return " ".join(function.name for function in self.functions)

    def refused(self, reason: str) -> UserError:
        """The error for an objective that cannot be used."""
        return UserError(f"--{self.flag} {self.names} {reason}; see docs/objectives.md.")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by name, without those that functions have at different values."""
        return merged([function.settings for function in self.functions])


def merged(all_settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of several functions by name, without those that have different values."""
    values = {name: each[name] for each in all_settings for name in each}
    return {n: v for n, v in values.items() if all(each.get(n, v) == v for each in all_settings)}


def parsed(name: str, text: str, default: Any) -> Any:
    """The value of a setting; raises a UserError if the text has another type than the default.

    A number must be finite; where the default is infinite, as of a bound that is off, it may be so.
    """
    kind = type(default)
    needed = {bool: "true or false", float: "a finite number"}.get(kind, kind.__name__)
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        value = math.nan
    if isinstance(value, float) and not (math.isfinite(value) or value == default):
        raise UserError(f"--objective_args has {name}={text}; it must be {needed}.")
    return value


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as `--objective_args` has them."""
    return [f"{name}={value}" for name, value in settings.items()]
