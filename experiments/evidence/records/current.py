"""Whether a record of training runs is of today's code: by its trajectories and its recipes.

A commit that leaves the first steps of every stage as they were (`tests/golden`) does not train
otherwise, up to rounding; so a record does not become old with every commit. Not seen is a change
of evaluation, of a driver, or of a recipe's Python file: after one, remove the record's folder.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

RECIPES = re.compile(r"assets/recipes/([\w/-]+\.(?:yaml|json))|--recipe ([\w-]+)")
OF_CASE = ("seed", "machine", "tolerance")  # next to its numbers
Versions = dict[str, dict[str, str]]  # of the golden cases of each stage


def trajectories(stages: Sequence[str], root: Path) -> Versions:
    """The versions of the golden trajectories of stages: a hash of each case's numbers."""
    versions: Versions = {}
    for stage in stages:
        cases = json.loads((root / "tests" / "golden" / f"{stage}.json").read_text())
        versions[stage] = {
            name: digest({k: v for k, v in case.items() if k not in OF_CASE})
            for name, case in cases.items()
        }
    return versions


def have_moved(recorded: Versions, today: Versions) -> bool:
    """Whether a recorded case has other numbers today, or is gone; a new case moves nothing."""
    return any(not cases.items() <= today[stage].items() for stage, cases in recorded.items())


def settings(command: str, root: Path) -> str:
    """A hash of the recipes that a text names, and of those that they name; not of comments."""
    recipes = root / "assets" / "recipes"
    values: dict[str, Any] = {}
    left = [command]
    while left:
        for file, folder in RECIPES.findall(left.pop()):
            for path in (recipes / folder).rglob("*") if folder else [recipes / file]:
                name = path.relative_to(recipes).as_posix()
                is_recipe = path.suffix in (".yaml", ".json") and path.name != "record.yaml"
                if is_recipe and name not in values:
                    values[name] = yaml.safe_load(path.read_text())
                    left.append(json.dumps(values[name]))
    return digest(values)


def is_same_command(commands: Sequence[str], command: str) -> bool:
    """Whether recorded commands are this one; its module may have moved to another folder."""
    folders = re.compile(r"^[\w.]*\.")
    return {folders.sub("", text) for text in commands} == {folders.sub("", command)}


def digest(value: Any) -> str:
    """A short hash of what fits in JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
