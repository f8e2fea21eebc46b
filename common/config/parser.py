"""A recipe (YAML) and the command line become one dataclass.

A recipe is turned into command-line arguments, the real command line is appended, and the whole is
parsed once: the last value wins, `1e-5` is a float whatever YAML makes of it, and a typo in either
place is refused.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from common.config.flags import FIRST, LAST
from common.config.hints import answer
from common.config.recipes import read_recipe
from common.errors import UserError

Config = TypeVar("Config")
Values = Mapping[str, Any]  # by name
HELP = ("-h", "--help")
# What argparse is to read as a value and not as a flag; left to itself it takes -1e-3 for a flag
NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|\.?inf$|nan$)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """One that raises a UserError."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise UserError(f"{message.rstrip('.')} (see --help for the flags).")


def parse(cls: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The stage's config from `--config recipe.yaml` and `--field value` arguments; the last wins.

    Raises a UserError for an unknown flag or key, a wrong type, and values that contradict.
    """
    return parse_given(cls, argv)[0]


def parse_given(
    cls: type[Config], argv: Sequence[str] | None = None
) -> tuple[Config, frozenset[str]]:
    """As `parse`, and the names of the flags that were given."""
    argv = [underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    usage = "%(prog)s [--config RECIPE] [--FLAG VALUE ...]"
    about = description_of(cls)
    layout = argparse.RawDescriptionHelpFormatter  # leaves the epilog's lines as they are
    options: dict[str, Any] = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}
    parser = Parser(usage=usage, description=about, formatter_class=layout, **options)
    parser._negative_number_matcher = NEGATIVE_NUMBER
    parser.add_argument("--config", metavar="RECIPE", help="YAML file with values of these flags")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    titles = headings(cls)
    found = [*dict.fromkeys(titles.values())]
    between = [title for title in found if title not in (*FIRST, *LAST)]
    order = [title for title in (*FIRST, *between, *LAST) if title in found]
    groups = {title: parser.add_argument_group(title) for title in order}
    for name, f in fields.items():
        add_flag(groups[titles[name]], f)
    given = vars(parser.parse_known_args([word for word in argv if word not in HELP])[0])
    recipe = read_recipe(given["config"]) if "config" in given else {}
    kinds: Sequence[Any] = getattr(cls, "objective_kinds", ())
    if {*HELP} & {*argv}:
        parser.epilog = describe_objectives(kinds, recipe | given)
    named = functools.partial(functions_of, kinds, recipe | given)
    words = recipe_arguments(given.get("config", ""), recipe, fields, named)
    arguments, strays = parser.parse_known_args([*words, *argv])
    if strays:
        others = [word for word in strays[1:] if word.startswith("--")]
        behind = [*itertools.takewhile(lambda word: word not in others, strays[1:])]
        answered = answer([strays[0], *others], list(fields), behind, named())
        raise UserError(f"unknown argument {answered}.")
    values = {name: value for name, value in vars(arguments).items() if name != "config"}
    config = cls(**values)
    if kinds:
        config.find_objective()  # type: ignore[attr-defined]  # refuses early what `main` would
    return config, frozenset(values)


def description_of(cls: type) -> str:
    """What the command is for, its rows, and how it is launched on several processes."""
    purpose = (sys.modules["__main__"].__doc__ or "").partition("\n")[0]
    launch = "Several processes: torchrun --standalone --nproc_per_node N %(prog)s ..."
    is_script = getattr(cls, "is_script", False)
    texts = (purpose, (cls.__doc__ or "").partition("\n")[0], launch * is_script)
    return "\n".join(filter(None, texts))


def typed(value: Any) -> str:
    """A default as one types it."""
    if isinstance(value, list):
        return " ".join(map(typed, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0")


def describe_objectives(kinds: Sequence[Any], given: Mapping[str, Any]) -> str:
    """The files of a stage's kinds of objectives, and the settings of those that are given."""
    texts = []
    for kind in kinds:
        texts.append(f"files for --{kind.flag}: {', '.join(kind.built_in())}")
        for function in kind.find(*filter(None, as_list(given.get(kind.flag, [])))).functions:
            texts.append(f"settings of {function.name}:")
            items = function.settings.items()
            texts += [f"  {name}={typed(value)} ({type(value).__name__})" for name, value in items]
    return "\n".join(texts)


def functions_of(kinds: Sequence[Any], given: Values) -> dict[str, list[Any]]:
    """The functions of objectives that are named, by flag; a user's is not run, nor a wrong one."""
    named: dict[str, list[Any]] = {}
    for kind in kinds:
        texts = [text for text in as_list(given.get(kind.flag, [])) if isinstance(text, str)]
        named[kind.flag] = [SimpleNamespace(name=text, text=text, settings={}) for text in texts]
        for place, text in enumerate(texts):
            if ".py" not in text:
                with contextlib.suppress(UserError):
                    named[kind.flag][place] = kind.function_of(text)
    return named


def as_list(value: Any) -> list[Any]:
    """A list of one value, or the list that it is."""
    return value if isinstance(value, list) else [value]


def underscored(word: str) -> str:
    """A flag as its field is written: `--batch_size=4` of `--batch-size=4`; other words as is."""
    flag, equals, value = word.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def headings(cls: type) -> dict[str, str]:
    """The heading over each field of a config class."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        title = "of this command"
        for name in inspect.get_annotations(base):
            if name.startswith("_"):
                title = getattr(base, name)
            else:
                found.setdefault(name, title)
    return found


def add_flag(group: Any, f: dataclasses.Field) -> None:
    """Give a field its flag."""
    from transformers.hf_argparser import string_to_bool

    is_list, default = get_origin(f.type) is list, f.metadata["default"]
    kind: Any = get_args(f.type)[0] if is_list else f.type
    note = "required" if f.metadata["required"] and not default else f"default: {typed(default)}"
    text = f.metadata["help"] + (f" ({note})" if note != "default: " else "")
    choices = f.metadata["choices"]
    group.add_argument(
        f"--{f.name}",
        help=text,
        type=string_to_bool if kind is bool else kind,
        nargs="*" if is_list else "?" if kind is bool else None,
        const=True if kind is bool else None,
        metavar=f"{{{','.join(map(str, choices))}}}" if choices else kind.__name__.upper(),
    )


def recipe_arguments(
    file: str, recipe: Values, fields: Values, named: Callable[[], Mapping[str, Sequence[Any]]]
) -> list[str]:
    """A recipe as `--key value` arguments; a UserError for one that no command line could have."""
    if unknown := [key for key in recipe if key not in fields]:
        answered = answer(unknown, list(fields), as_list(recipe[unknown[0]]), named())
        raise UserError(f"--config {file} has the unknown key {answered}.")
    lists = {name for name, field in fields.items() if isinstance(field.metadata["default"], list)}
    arguments = []
    for key, value in recipe.items():
        items = value if isinstance(value, list) and key in lists else [value]
        if not all(isinstance(item, str) for item in items):
            what = "one value, settings of an objective without a blank in it"
            raise UserError(f"--config {file} gives {value} for {key!r}; it must be {what}.")
        # A single value may begin with a dash: it is one argument with its flag
        arguments += [f"--{key}", *items] if key in lists else [f"--{key}={items[0]}"]
    return arguments
