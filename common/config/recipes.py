"""Recipes: YAML files with values of flags."""

from pathlib import Path
from typing import Any

from common.errors import UserError, gist, why_missing


def read_recipe(file: str, *, typed: bool = False) -> dict[Any, Any]:
    """The values of a recipe by key.

    Every value is text, as on a command line: its field says what it is. If `typed`, it is as YAML
    1.1 reads it, for which 010 is 8, 1:30 is 90 and `no` is false. A UserError for a file that is
    no YAML, or has a key twice at one place: YAML keeps the last.
    """
    import yaml

    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        loader = yaml.SafeLoader(text) if typed else yaml.BaseLoader(text)
        nodes = loader.get_single_node()
        repeated = repeated_key(nodes)  # before keys are merged (<<), which changes the nodes
        recipe = loader.construct_document(nodes) if nodes else {}
    except OSError as error:
        reason = f"{error.strerror}{why_missing(file)}"
        raise UserError(f"--config {file} cannot be read: {reason}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--config {file} is not UTF-8: {error.reason}.") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"--config {file} is not YAML: {line}{error.problem}.") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {file} is not YAML: {gist(error)}.") from None
    if not isinstance(recipe, dict):
        raise UserError(f"--config {file} must hold `key: value` lines.")
    for key, value in getattr(nodes, "value", []):
        is_plain = not typed and getattr(value, "style", "") is None
        if is_plain and value.value in ("", "~", "null"):
            raise UserError(f"--config {file} gives nothing for {key.value!r}; it must be a value.")
    if repeated:
        line, key = repeated.start_mark.line + 1, repeated.value
        raise UserError(f"--config {file}, line {line}: the key {key!r} is there twice.")
    return recipe


def repeated_key(node: Any) -> Any:
    """A key of a YAML node, or of one inside it, that its mapping has twice; None without one."""
    is_mapping, children = getattr(node, "id", "") == "mapping", getattr(node, "value", None)
    if not isinstance(children, list):
        return None
    first: dict[str, Any] = {}
    for child in children:
        key, value = child if is_mapping else (None, child)
        if key and first.setdefault(str(key.value), key) is not key:
            return key
        if inside := repeated_key(value):
            return inside
    return None
