"""A recipe (YAML) and the command line become one dataclass.

A recipe is turned into command-line arguments, the real command line is appended, and the whole is
parsed once: the last value wins, `1e-5` is a float whatever YAML makes of it, and a typo in either
place is refused.
"""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin

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
    argv = [underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    usage = "%(prog)s [--config RECIPE] [--FLAG VALUE ...]"
    layout = argparse.RawDescriptionHelpFormatter  # leaves the epilog's lines as they are
    options: dict[str, Any] = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}
    parser = Parser(usage=usage, formatter_class=layout, **options)
    parser._negative_number_matcher = NEGATIVE_NUMBER
    parser.add_argument("--config", metavar="RECIPE", help="YAML file with values of these flags")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    titles = headings(cls)
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(titles.values())}
    for name, f in fields.items():
        add_flag(groups[titles[name]], f)
    given = vars(parser.parse_known_args([word for word in argv if word not in HELP])[0])
    kinds: Sequence[Any] = getattr(cls, "objective_kinds", list)()
    recipe = read_recipe(given["config"]) if "config" in given else {}
    if {*HELP} & {*argv}:
        parser.epilog = describe_objectives(kinds, recipe | given)
    words = recipe_arguments(recipe, fields, given, kinds)
    arguments, strays = parser.parse_known_args([*words, *argv])
    if strays:
        others = [word for word in strays[1:] if word.startswith("--")]
        raise UserError(f"unknown argument {answer([strays[0], *others], list(fields))}.")
    values = {name: value for name, value in vars(arguments).items() if name != "config"}
    if settings := given.get("objective_args"):  # of several for one name, the last wins
        before = vars(parser.parse_known_args(words)[0]).get("objective_args", [])
        values["objective_args"] = [*before, *settings]
    config: Any = cls(**values)
    config.given = frozenset(values)
    return config  # type: ignore[no-any-return]


def describe_objectives(kinds: Sequence[Any], given: Mapping[str, Any]) -> str:
    """The files of a stage's kinds of objectives, and the settings of those that are given."""
    texts = []
    for kind in kinds:
        texts.append(f"files for --{kind.flag}: {', '.join(kind.built_in())}")
        for function in kind.find([n for n in as_list(given.get(kind.flag, [])) if n]).functions:
            texts.append(f"settings of {function.name}:")
            items = function.settings.items()
            texts += [f"  {name}={value} ({type(value).__name__})" for name, value in items]
    return "\n".join(texts)


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
    note = "required" if f.metadata["required"] and not default else f"default: {default}"
    text = f.metadata["help"] + (f" ({note})" if note not in ("default: ", "default: []") else "")
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
    recipe: Values, fields: Values, given: Values, kinds: Sequence[Any]
) -> list[str]:
    """A recipe as `--key value` arguments, without settings of objectives that `given` replaces.

    A UserError for a key or a value that no command line could have.
    """
    file, values = given.get("config"), dict[str, list[str]]()
    if unknown := [key for key in recipe if key not in fields]:
        raise UserError(f"--config {file} has the unknown key {answer(unknown, list(fields))}.")
    lists = {name for name, field in fields.items() if isinstance(field.metadata["default"], list)}
    for key, value in recipe.items():
        values[key] = value if isinstance(value, list) and key in lists else [value]
        if not all(isinstance(item, str) for item in values[key]):
            raise UserError(f"--config {file} gives {value} for {key!r}; it must be one value.")
    arguments = []
    for key, items in without_replaced(values, fields, given, kinds).items():
        # A single value may begin with a dash: it is one argument with its flag
        arguments += [f"--{key}", *items] if key in lists else [f"--{key}={items[0]}"]
    return arguments


def without_replaced(
    recipe: Mapping[str, list[str]], fields: Values, given: Values, kinds: Sequence[Any]
) -> dict[str, list[str]]:
    """A recipe without the settings of functions that `given` replaces; prints what it removes."""
    kept, replaced = set[str](), set[str]()
    defaults = {name: [*map(str, as_list(f.metadata["default"]))] for name, f in fields.items()}
    for kind in kinds:
        before = recipe.get(kind.flag, defaults[kind.flag])
        now = as_list(given.get(kind.flag, before))
        replaced.update([*kind.flags, "loss_weights"] if now != before else [])
        stay = [name for name in now if name and name in before]
        kept.update(kind.optional, *(kind.function_of(name).settings for name in stay))
    values = {name: items for name, items in recipe.items() if name not in replaced - kept}
    removed = [name for name in recipe if name not in values and recipe[name] != defaults[name]]
    texts = [f"{name}={' '.join(recipe[name])}" for name in removed]
    if replaced and "objective_args" in recipe:
        arguments = recipe["objective_args"]
        values["objective_args"] = [text for text in arguments if text.partition("=")[0] in kept]
        texts += [text for text in arguments if text and text not in values["objective_args"]]
    if texts:
        from common import distributed  # torch, which a driver of runs does without

        where = f"{given['config']}, whose objective the command line replaces"
        distributed.print_rank0(f"not taken from {where}: {', '.join(texts)}")
    return values
