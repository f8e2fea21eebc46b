"""Objectives by name: a built-in file, or `path/to/file.py:function`, with settings behind it.

clip    clip:epsilon_high=0.28,delta=3    mine.py:truncated:bound=3
"""

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
    name: str  # without settings
    text: str  # with those that are given
    function: Callable[..., Any]
    inputs: Sequence[str]  # what it takes, by name
    settings: Mapping[str, Any]
    constants: Mapping[str, Any]  # of its file

    @property
    def is_built_in(self) -> bool:
        """Whether it is no user's."""
        return ".py:" not in self.name


@dataclass(frozen=True)
class Objective:
    """The functions that a flag names; a class for each kind, see `kinds.py`."""

    flag: ClassVar[str]
    folder: ClassVar[str]  # of the built-in files, in `common/objectives`
    inputs: ClassVar[Sequence[str]]  # what a function may take
    functions: Sequence[Function]

    @classmethod
    def built_in(cls) -> list[str]:
        """Names of the built-in files."""
        return sorted(f.stem for f in Path(__file__).with_name(cls.folder).glob("[!_]*.py"))

    @classmethod
    def find(cls, *texts: str | Sequence[str], **fields: Any) -> Self:
        """The functions of built-in files, or of a user's files, which are run.

        Each by its name, with settings behind a colon; a list of them is taken too. The `fields`
        are those of the class. A UserError if there is no such function or setting.
        """
        names = [name for text in texts for name in ([text] if isinstance(text, str) else text)]
        return cls([cls.function_of(name) for name in names], **fields)

    @classmethod
    def function_of(cls, text: str) -> Function:
        """The function of a name, with its defaults but for the settings behind the name."""
        name, given = split_settings(text)
        if name in (built_in := cls.built_in()):
            constants = vars(import_module(f"common.objectives.{cls.folder}.{name}"))
            function = constants[name]
        elif ".py" in name:
            function = load_once(name, f"--{cls.flag}")
            constants = vars(module_of(Path(name.rpartition(":")[0]).expanduser()))
        else:
            choice = f"file.py:function, or one of {', '.join(built_in)} ({hint(name, built_in)})"
            if "=" in name:
                choice = "behind a name, without blanks, and in a recipe's list in quotes"
            raise UserError(f"--{cls.flag} is {text!r}; it must be {choice}.")
        parameters = inspect.signature(function).parameters.values()
        defaults = {
            p.name: p.default
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and type(p.default) in TYPES and p.name not in cls.inputs
        }
        inputs = [p.name for p in parameters if p.name not in defaults]
        if wrong := [each for each in inputs if each not in cls.inputs]:
            choice = ", ".join(cls.inputs)
            settings = "settings behind a * with a bool, number or text as default"
            taken = f"takes {', '.join(wrong)}; it may take {choice} and {settings}"
            raise UserError(f"--{cls.flag} {name} {taken}; see docs/objectives.md.")
        values = {n: parsed(f"--{cls.flag} {name}", n, v, defaults) for n, v in given}
        return Function(cls.flag, name, text, function, inputs, defaults | values, constants)

    @property
    def is_built_in(self) -> bool:
        """Whether no function is a user's."""
        return all(function.is_built_in for function in self.functions)

    @property
    def names(self) -> str:
        """The functions as the flag has them."""
        return " ".join(function.text for function in self.functions)

    def refused(self, reason: str) -> UserError:
        """The error for an objective that cannot be used."""
        return UserError(f"--{self.flag} {self.names} {reason}; see docs/objectives.md.")


def split_settings(text: str) -> tuple[str, list[tuple[str, str | None]]]:
    """The name in `name:setting=value,...`, and the settings in the order given, None without a =.

    >>> split_settings("my/file.py:bounded:bound=3,detach=true")
    ('my/file.py:bounded', [('bound', '3'), ('detach', 'true')])
    """
    file, py, rest = text.partition(".py:")
    name, _, settings = (rest if py else file).partition(":")
    name = file + py + name if py else name
    parts = [setting.partition("=") for setting in settings.split(",") if setting]
    return name, [(setting, value if equals else None) for setting, equals, value in parts]


def parsed(function: str, name: str, text: str | None, defaults: Mapping[str, Any]) -> Any:
    """The value of a setting; a UserError for one that the function has not, or not of its type.

    A number must be finite; where the default is infinite, as of a bound that is off, it may be so.
    """
    if name not in defaults:
        names = ", ".join(defaults) or "none"
        reason = f"has no setting {name!r}; its settings are {names}; see docs/objectives.md"
        raise UserError(f"{function} {reason}.")
    if text is None:
        raise UserError(f"{function} has {name} without a value; write {name}=VALUE.")
    default = defaults[name]
    kind = type(default)
    needed = {bool: "true or false", float: "a finite number"}.get(kind, kind.__name__)
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        value = math.nan
    if isinstance(value, float) and not (math.isfinite(value) or value == default):
        raise UserError(f"{function} has {name}={text}; it must be {needed}.")
    return value
