"""Whether a record is of today's code: by the trajectories and the settings it was made under.

A commit that leaves the first steps of every stage as they were (`tests/golden`) leaves the results
of whole runs too, up to rounding; so a record does not become old with every commit.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

RECIPES = re.compile(r"assets/recipes/([\w/-]+\.yaml)|--recipe ([\w-]+)")


def trajectories(stages: Sequence[str], root: Path) -> dict[str, str]:
    """The version of the golden trajectories of each stage: a hash of the numbers."""
    files = {stage: root / "tests" / "golden" / f"{stage}.json" for stage in stages}
    return {stage: digest(json.loads(file.read_text())["cases"]) for stage, file in files.items()}


def settings(command: str, root: Path) -> str:
    """A hash of the recipes that a command names, and of those that they name; not of comments."""
    recipes, found = root / "assets" / "recipes", {}
    left = [command]
    while left:
        for file, folder in RECIPES.findall(left.pop()):
            for path in (recipes / folder).rglob("*.yaml") if folder else [recipes / file]:
                name = path.relative_to(recipes).as_posix()
                if name not in found:
                    found[name] = yaml.safe_load(path.read_text())
                    left.append(json.dumps(found[name]))
    return digest(found)


def digest(value: Any) -> str:
    """A short hash of what fits in JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
