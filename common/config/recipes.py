"""Recipes: YAML files with values of flags."""

import re
from pathlib import Path
from typing import Any

from common.errors import UserError, gist, why_missing


def read_recipe(file: str, *, typed: bool = False) -> dict[Any, Any]:
    """The values of a recipe by key.

    Every value is text but for null, as on a command line: its field says what it is. If `typed`,
    it is as YAML 1.1 reads it, for which 010 is 8, 1:30 is 90 and `no` is false.

    Raises:
        UserError: the file cannot be read, is not YAML, or has a key twice: YAML keeps the last.
    """
    import yaml

    class Texts(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012 - as yaml has it

    null = re.compile(r"(~|null|Null|NULL|)\Z")
    Texts.add_implicit_resolver("tag:yaml.org,2002:null", null, None)
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        loader = yaml.SafeLoader(text) if typed else Texts(text)
        nodes = loader.get_single_node()
        recipe = loader.construct_document(nodes) if nodes else {}
    except OSError as error:
        reason = f"{error.strerror}{why_missing(file)}"
        raise UserError(f"--config {file} cannot be read: {reason}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", "")
        reason = f"line {mark.line + 1}, {problem}" if mark else gist(error)
        raise UserError(f"--config {file} is not YAML: {reason}.") from None
    if not isinstance(recipe, dict):
        raise UserError(f"--config {file} must hold `key: value` lines.")
    first: dict[str, Any] = {}
    for key, _ in getattr(nodes, "value", []):
        if first.setdefault(str(key.value), key) is not key:
            line = key.start_mark.line + 1
            raise UserError(f"--config {file}, line {line}: the key {key.value!r} is there twice.")
    return recipe
