"""Which test files are about a module, as their docstrings say behind the word "About".

    python -m tests.map                 # every module of common/ and experiments/, and the scripts
    python -m tests.map losses padding  # those whose names have one of these texts

A docstring names modules, rooms, of which every module is meant, or other files.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SENTENCE = re.compile(r"\bAbout((?:\s`[\w./-]+`,?(?:\sand)?)+)\.")


def about(file: Path) -> list[str]:
    """Names of modules, rooms and files that a test file is about."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return [name for text in SENTENCE.findall(docstring) for name in re.findall("`(.+?)`", text)]


def modules() -> list[str]:
    """Dotted names of all modules, the scripts first."""
    rooms = [path for room in ("common", "experiments") for path in sorted(ROOT.glob(f"{room}/**"))]
    paths = [*sorted(ROOT.glob("*.py")), *(file for room in rooms for file in room.glob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name for name in names if not name.endswith("__init__")]


def files_of_modules() -> dict[str, list[str]]:
    """Names of the test files of each module."""
    files = {file: about(file) for file in sorted(ROOT.glob("tests/**/test_*.py"))}
    return {
        module: [
            str(file.relative_to(ROOT / "tests"))
            for file, names in files.items()
            if any(f"{module}.".startswith(f"{name}.") for name in names if name != "common")
        ]
        for module in modules()
    }


if __name__ == "__main__":
    for module, tests in files_of_modules().items():
        if not sys.argv[1:] or any(text in module for text in sys.argv[1:]):
            print(f"{module:44} {', '.join(tests)}")
