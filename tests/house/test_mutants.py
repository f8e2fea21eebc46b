"""Claim: a mutant changes one place, of each kind, and meets the tests that reach it.

Those that change nothing are still there. About `tests/mutants.py` and `tests/support/reached.py`.
"""

import ast
import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutants

SOURCE = '''
if TYPE_CHECKING:
    from a import b
def f(x: int = 1, *, flag: bool = True) -> float:
    """Not 2 + 2."""
    if x < 2 and not flag:
        raise ValueError(f"{x + 1}")
    x += 3
    g(zip(x, strict=False), strict=True)
    return torch.exp(x).sum() if flag else -min(x, 0.5)
'''
CHANGES = {
    "1": "2",
    "True": "False",
    "x < 2 and (not flag)": "x < 2 or not flag",
    "x < 2": "x <= 2",
    "2": "3",
    "not flag": "flag",
    "x += 3": "x -= 3",
    "3": "4",
    "g(zip(x, strict=False), strict=True)": "pass",
    "torch.exp(x).sum()": "torch.exp(x).mean()",
    "-min(x, 0.5)": "min(x, 0.5)",
    "min(x, 0.5)": "max(x, 0.5)",
    "0.5": "0.75",
}


def changed(source: str) -> list[tuple[str, str]]:
    """Every place of a source, and what may stand there."""
    return [
        (ast.unparse(node), ast.unparse(other))
        for _, node in mutants.places(ast.parse(source))
        for other in mutants.changes(node)
    ]


def test_each_kind_of_place_is_changed_and_no_message_or_annotation():
    found = changed(SOURCE)
    assert CHANGES.items() <= {*found}
    assert ("False", "True") not in found
    assert {("torch.exp(x)", "torch.expm1(x)"), ("torch.exp(x)", "x")} <= {*found}
    negated = [
        after for _, after in found if after.startswith(("if not (x", "torch.exp(x).sum() if not"))
    ]
    assert len(negated) == 2
    assert found.count(("True", "False")) == 2  # `strict` of another function too
    assert len(found) == len(CHANGES) + 5


def test_a_mutant_differs_from_its_module_in_one_place():
    drawn = mutants.mutants("common.losses")
    assert len({mutant.key for mutant in drawn}) == len(drawn) > 80
    source = ast.unparse(ast.parse((mutants.ROOT / "common" / "losses.py").read_text()))
    for mutant in drawn[::10]:
        (line,) = {*mutant.text.splitlines()} - {*source.splitlines()}
        assert mutant.after.split("\n")[0] in line


TOY = """
LIMIT = 3

class Counter:
    def above(self, values: list[int]) -> int:
        return sum(value > LIMIT for value in values)

def double(
    value: int, times: int = 2
) -> int:
    return value * times

def idle() -> int:
    return 0
"""
RUN = """
import json, os, subprocess, sys
from pathlib import Path
from tests.support import reached
noted, places = reached.watch([Path("toy.py")], Path.cwd())
import toy
noted.take()
found = []
for call in (
    lambda: toy.double(1),
    lambda: os.fork() or (toy.Counter().above([1]), os._exit(0)),
    lambda: subprocess.run([sys.executable, "-c", "import toy; toy.idle()"], check=True),
):
    if isinstance(pid := call(), int) and pid > 9:
        os.waitpid(pid, 0)
    found.append([places[i] for i in sorted(noted.take())])
print(json.dumps(found))
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the module `toy`, in which the process is."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    return tmp_path


def test_what_a_call_a_fork_and_a_process_reach_is_noted(toy: Path) -> None:
    packages = f"{toy}:{Path(__file__).parents[2]}"
    result = subprocess.run(
        [sys.executable, "-c", RUN],
        env={"PYTHONPATH": packages},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    call, fork, process = (
        {line for path, line in found if path == "toy.py"} for found in json.loads(result.stdout)
    )
    assert call == {8, 11}
    assert fork == {5, 6}
    assert 14 in process  # which has imported the module too
    assert not {6, 11} & process


def test_a_function_gets_the_code_of_its_mutant(toy: Path) -> None:
    module = importlib.import_module("toy")
    above = module.Counter().above  # as a test has imported it
    gc.freeze()  # as when tests are collected
    for mutant in mutants.mutants("toy"):
        if mutant.function == "Counter.above" and mutant.after == "value >= LIMIT":
            assert mutants.outermost(mutant) == "Counter.above"
            mutants.replace_code(mutant)
    gc.freeze()
    assert above([3, 4]) == 2


def test_a_fork_meets_the_mutant_in_the_file(toy: Path) -> None:
    mutant = next(one for one in mutants.mutants("toy") if one.after == "value / times")
    with mutants.written(mutant):
        pid = os.fork()
        status = os.waitpid(pid, 0)[1] if pid else 0
    if not pid:  # behind the block, where its tests run
        os._exit(Path("toy.py").read_text() != mutant.text)
    assert status == 0
    assert Path("toy.py").read_text() == TOY


def status_of_a_child() -> int | None:
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join()
    return child.exitcode


def test_tests_may_start_processes_where_mutants_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "in_copy", os.getpid)
    with mutants.workers(1) as pool:
        assert pool.submit(status_of_a_child).result() == 0


def test_the_tests_of_a_place_are_those_that_reach_its_statement(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = {"tests/test_own.py": 0, "tests/test_room.py": 1}
    monkeypatch.setattr(mutants, "near_files", lambda module: near)
    tests = {
        "tests/test_far.py::far": mutants.Test(0.1, {"toy.py": [11]}),
        "tests/test_room.py::multiplies": mutants.Test(0.1, {"toy.py": [8, 11]}),
        "tests/test_room.py::counts": mutants.Test(0.1, {"toy.py": [6]}),
        "tests/test_own.py::multiplies": mutants.Test(9.0, {"toy.py": [8, 11]}),
        "tests/test_own.py::other": mutants.Test(0.1, {"other.py": [11]}),
    }
    reach = {mutant.after: [*mutants.reaching(mutant, tests)] for mutant in mutants.mutants("toy")}
    multiplies = ["tests/test_own.py::multiplies", "tests/test_room.py::multiplies"]
    assert reach["value / times"] == multiplies
    assert reach["value >= LIMIT"] == ["tests/test_room.py::counts"]
    assert {*reach["4"]} == {*tests} - {"tests/test_far.py::far"}  # outside of functions
    assert reach["1"] == []


@pytest.mark.parametrize("key", mutants.equivalent(), ids=lambda key: f"{key[0]} {key[1]}")
def test_a_mutant_that_changes_nothing_is_still_one(key):
    assert key in mutants.keys_of(key[0])
    assert mutants.equivalent()[key].endswith(".")
