"""Claim: a module imports what is beside it or above it in the README's tree; rooms are small.

Imports inside functions count. Every module can be imported by itself. There is one version. About
`common` and `README.md`.
"""

import ast
import importlib
import re
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

from tests.map import about, files_of_modules

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "common").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))
MOST_MODULES = 12
MOST_IN_FUNCTION, MOST_IN_MAIN = 60, 110


def names_in_tree() -> list[str]:
    """The modules at the top of `common/` and its rooms, from the top of the tree down."""
    tree = (ROOT / "README.md").read_text().split("\ncommon/ ", 1)[1].split("\nexperiments/", 1)[0]
    words = [
        takewhile(re.compile(r"\w+(\.py|/)$").match, line.split()) for line in tree.splitlines()
    ]
    return [word.removesuffix(".py").removesuffix("/") for line in words[1:] for word in line]


def place(module: str) -> str:
    """The room that `common.room.module` is in, or the module at the top that it is."""
    return module.split(".")[1]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


NAMES = {dotted(path) for path in [*MODULES, *EXPERIMENTS]}


def imported(path: Path) -> set[str]:
    """The modules of `common` and `experiments` that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & NAMES


def test_a_room_imports_only_what_stands_above_it():
    order = names_in_tree()
    assert sorted(order) == sorted({place(dotted(path)) for path in MODULES} - {"__init__"})
    for path in MODULES:
        for name in imported(path):
            assert order.index(place(name)) <= order.index(place(dotted(path))), (path, name)


def test_no_module_imports_itself_by_way_of_others():
    paths = [*MODULES, *EXPERIMENTS]
    list(TopologicalSorter({dotted(path): imported(path) for path in paths}).static_order())


def test_only_experiments_imports_experiments():
    for path in [*MODULES, *ROOT.glob("*.py")]:
        assert not re.search(r"^\s*(from|import) experiments\b", path.read_text(), re.M), path


def test_rooms_are_small():
    for room in {path.parent for path in [*MODULES, *EXPERIMENTS]}:
        modules = [path for path in room.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, room


def test_functions_are_short():
    for path in [*MODULES, *EXPERIMENTS, *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                most = MOST_IN_MAIN if node.name == "main" else MOST_IN_FUNCTION
                assert node.end_lineno - node.lineno < most, (path.name, node.name)


def room_of(module: str) -> Path:
    """The room of `tests/` for a module: the innermost that mirrors a package it is in."""
    path = Path(*module.removeprefix("common.").split("."))
    return next(room for room in (path, *path.parents) if (ROOT / "tests" / room).is_dir())


def test_every_test_file_says_what_it_is_about_and_every_module_has_one():
    for file in ROOT.glob("tests/**/test_*.py"):
        names, room = about(file), file.parent.relative_to(ROOT / "tests")
        assert names, file
        is_mirrored = (ROOT / "common" / room).is_dir() or (ROOT / room).is_dir()
        assert is_mirrored or str(room) in ("house", "stages"), room
        first = next((name for name in names if name.startswith(("common.", "experiments."))), "")
        assert not first or room in (room_of(first), Path("house"), Path("stages")), (file, first)
        for name in names:
            path = ROOT / name.replace(".", "/")
            is_module = "/" not in name and (path.is_dir() or path.with_suffix(".py").is_file())
            assert is_module or (ROOT / name).is_file(), (file, name)
    tests = files_of_modules()
    paths = [path for path in [*MODULES, *EXPERIMENTS] if path.stem != "__init__"]
    assert set(map(dotted, paths)) <= tests.keys()
    assert all(tests.values())


def test_mypy_can_check_every_study():
    """A folder with a hyphen is no package: its modules are at the top, so their names are one."""
    files = ROOT.glob("assets/recipes/*-*/*.py")
    names = [file.name for file in files]
    advice = "name a study that has Python files by underscores, as `my_study`"
    assert len({*names}) == len(names), advice


def test_the_version_is_that_of_pyproject():
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f" version = {{{version}}}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_every_module_is_imported(path: Path):
    if path.stem not in ("__main__", "patched"):
        importlib.import_module(dotted(path).removesuffix(".__init__"))


def test_what_the_quick_check_leaves_out_is_there() -> None:
    """And no test that shows the numbers of a whole stage, objective or sampler is among it."""
    statements = ast.parse((ROOT / "tests" / "conftest.py").read_text()).body
    named = {s.targets[0].id: s.value for s in statements if isinstance(s, ast.Assign)}
    slow = ast.literal_eval(named["SLOW"])
    assert [name for name in slow if not (ROOT / "tests" / name).is_file()] == []
    assert [*slow] == sorted({*slow})
    shows = {"test_golden.py", "test_one_file.py", "test_objectives.py", "test_losses.py"}
    shows |= {"test_generation.py", "test_advantages.py", "test_forward.py", "test_mended.py"}
    assert shows & {Path(name).name for name in slow} == set()
