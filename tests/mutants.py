"""How many small changes of a module do its tests notice?

    make mutants MODULES="losses noise"           # 60 places of each, drawn
    python -m tests.mutants --places 0 losses     # every place
    python -m tests.mutants --seed 7 model.optim  # other ones

A mutant is a module with one place changed: an operator, a comparison, a number, a condition, a
call left out or exchanged. Its tests run until one fails, in a forked process and a copy of the
project: first the files about the module (`tests/map.py`), then the others of their rooms, then the
golden trajectories. A survivor shows that a test is missing, or it changes nothing: then it is
listed in `equivalent_mutants.json` with the reason. The exit status is 1 if fewer than 97% of those
that are not listed are noticed.
"""

import argparse
import ast
import copy
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from tests import map as test_map

ROOT = test_map.ROOT
COPIES = ROOT / "output" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.json"
GOLDEN = "stages/test_golden.py"
LEAST = 0.97  # of the mutants that change something
SHARED = ("numpy", "pytest", "scipy.stats", "transformers", "datasets", "hypothesis")
SPARE_SECONDS = 30  # over four times what the tests take
MOST_SECONDS = 1200.0  # of the tests without a change, and of those that are less near
SURVIVED = "survived"
NOT_COPIED = (".*", "output", "data", "wandb", "__pycache__")

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
PAIRS = (
    *(("minimum", "maximum"), ("min", "max"), ("amin", "amax"), ("argmin", "argmax")),
    *(("mean", "sum"), ("any", "all"), ("floor", "ceil"), ("clamp_min", "clamp_max")),
)
EXCHANGED = {name: other for pair in PAIRS for name, other in (pair, pair[::-1])}
EXCHANGED |= {"exp": "expm1", "log": "log1p", "zeros": "ones", "zeros_like": "ones_like"}
LEFT_OUT = {"abs", "clamp", "clone", "contiguous", "detach", "double", "exp", "flip", "float"}
LEFT_OUT |= {"log", "relu"}

Node = TypeVar("Node", bound=ast.AST)
KEY = ("module", "function", "before", "after", "nth")
Key = tuple[str, str, str, str, int]


@dataclass(frozen=True)
class Mutant:
    """A module with one place changed."""

    module: str  # dotted
    function: str  # qualified name of the function or class around the place, empty outside
    before: str
    after: str
    nth: int = 0  # among those of this function with the same change
    line: int = 0
    text: str = ""  # the whole module
    outcome: str = ""  # the tests that noticed it, see `tiers`; or survived

    @property
    def key(self) -> Key:
        """Names the place, also when other lines of the module have changed."""
        return self.module, self.function, self.before, self.after, self.nth

    def __str__(self) -> str:
        """A line about it."""
        place = f"{path_of(self.module)}:{self.line} {self.function}"
        return f"{place}: {self.before[:100]!r} as {self.after[:100]!r}"


# ---- mutants -------------------------------------------------------------------------------------


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    source = (ROOT / path_of(module)).read_text()
    tree = ast.parse(source)
    found: list[Mutant] = []
    seen: Counter[Key] = Counter()
    for function, node in places(tree):
        for changed in changes(node):
            after = ast.unparse(changed)
            mutant = Mutant(module, function, ast.unparse(node), after, line=node.lineno)
            text = ast.unparse(ast.fix_missing_locations(Exchange(node, changed).visit(tree)))
            Exchange(changed, node).visit(tree)
            found.append(replace(mutant, nth=seen[mutant.key], text=text))
            seen[mutant.key] += 1
    return sorted(found, key=lambda mutant: mutant.line)


class Exchange(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """The tree with the new node."""
        return self.new if node is self.old else self.generic_visit(node)


def places(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Expressions and statements that run, each with the name of the function around it.

    Left out are annotations and decorators, and what only a message says: f-strings and `raise`.
    """
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.Raise, ast.JoinedStr)):
                continue
            inside = function
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{function}.{node.name}".lstrip(".")
            if isinstance(node, (ast.expr, ast.stmt)):
                yield inside, node
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                yield from places(node, inside)


def changes(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    """What may stand in the place of a node."""
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield like(node, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.Compare(ops=[op, *others]) if type(op) in COMPARISONS:
            yield like(node, ops=[COMPARISONS[type(op)](), *others])
        case ast.BoolOp(op=op):
            yield like(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.Constant(value=bool() | int() | float() as value):
            yield like(node, value=another(value))
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield like(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()):
            yield ast.copy_location(ast.Pass(), node)
        case ast.Call():
            yield from calls(node)


def calls(node: ast.Call) -> Iterator[ast.expr]:
    """A call of the opposite function, or without it: `x.exp()` as `x`."""
    match node.func:
        case ast.Name(id=name) if name in EXCHANGED:
            yield like(node, func=like(node.func, id=EXCHANGED[name]))
        case ast.Attribute(value=value, attr=name):
            if name in EXCHANGED:
                yield like(node, func=like(node.func, attr=EXCHANGED[name]))
            is_torch = isinstance(value, ast.Name) and value.id == "torch"
            if name in LEFT_OUT and (node.args or not is_torch):
                yield node.args[0] if is_torch else value


def another(value: float) -> float:
    """A value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.5 + (value == 0)


def like(node: Node, **fields: object) -> Node:
    """A copy of the node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def path_of(module: str) -> str:
    """The module's file, from the project's root."""
    return f"{module.replace('.', '/')}.py"


# ---- tests ---------------------------------------------------------------------------------------


def tiers(module: str) -> dict[str, list[str]]:
    """Test files by how near they are: about the module, others of their rooms, of whole stages."""
    own = [file for file in test_map.files_of_modules()[module] if file != GOLDEN]
    rooms = {(ROOT / "tests" / file).parent for file in own}
    files = [
        str(file.relative_to(ROOT / "tests")) for room in rooms for file in room.glob("test_*.py")
    ]
    others = sorted({*files} - {*own, GOLDEN})
    return {"own": own, "room": others, "golden": [GOLDEN]}


def run_tests(files: Sequence[str], seconds: float) -> str:
    """Run test files in a forked process: passed, failed, or what took longer, late."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        import pytest

        paths = [f"tests/{file}" for file in files]
        os._exit(pytest.main([*paths, "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "failed" if status else "passed"
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "late"


def in_copy() -> None:
    """Let this process work in a copy of the project of its own."""
    place = COPIES / str(os.getpid())
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*NOT_COPIED))
    os.chdir(place)
    sys.path[:] = [str(place), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # the copy's are imported


def clean_seconds(module: str) -> float:
    """How long the module's own test files take without a change. They must pass."""
    start, (files, *_) = time.monotonic(), tiers(module).values()
    outcome = run_tests(files, MOST_SECONDS)
    if outcome != "passed":
        sys.exit(f"error: without a change {outcome}: {' '.join(files)}")
    return time.monotonic() - start


def tried(mutant: Mutant, clean: float) -> Mutant:
    """The mutant with its outcome. What hangs, or takes far longer, is noticed too."""
    file = Path(path_of(mutant.module))
    source = file.read_text()
    try:
        file.write_text(mutant.text)
        for tier, files in tiers(mutant.module).items():
            limit = 4 * clean + SPARE_SECONDS if tier == "own" else MOST_SECONDS
            if files and run_tests(files, limit) != "passed":
                return replace(mutant, outcome=tier)
    finally:
        file.write_text(source)
    return replace(mutant, outcome=SURVIVED)


# ---- the table -----------------------------------------------------------------------------------


def equivalent() -> dict[Key, str]:
    """Reasons why mutants change nothing."""
    entries = json.loads(EQUIVALENT.read_text())
    return {tuple(entry[name] for name in KEY): entry["why"] for entry in entries}


def main() -> None:
    """Draw mutants of each module, run their tests, print a table and the survivors."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("modules", nargs="+", help="as losses or model.optim, in common/")
    parser.add_argument("--places", type=int, default=60, help="of each module; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    names = [f"common.{name}" for name in arguments.modules]
    if unknown := {*names} - test_map.files_of_modules().keys():
        parser.error(f"no module {', '.join(sorted(unknown))}")
    for name in SHARED:
        importlib.import_module(name)  # once, for all forked processes
    torch.set_num_threads(1)
    shutil.rmtree(COPIES, ignore_errors=True)
    known, is_good = equivalent(), True
    print(f"{'module':34} own room golden equivalent survived of")
    with multiprocessing.get_context("fork").Pool(arguments.processes, in_copy) as pool:
        for name in names:
            drawn = mutants(name)
            random.Random(arguments.seed).shuffle(drawn)
            drawn = drawn[: arguments.places or None]
            clean = pool.apply(clean_seconds, [name])
            left = [mutant for mutant in drawn if mutant.key not in known]
            done = pool.starmap(tried, [(mutant, clean) for mutant in left], chunksize=1)
            counts = Counter(mutant.outcome for mutant in done)
            is_good &= counts[SURVIVED] <= (1 - LEAST) * len(left)
            columns = [
                *(counts[tier] for tier in ("own", "room", "golden")),
                len(drawn) - len(left),
            ]
            widths = (3, 4, 6, 10, 8)
            cells = zip([*columns, counts[SURVIVED]], widths, strict=True)
            print(f"{name:34}", *(f"{cell:{width}}" for cell, width in cells), len(drawn))
            for mutant in done:
                if mutant.outcome != "own":
                    print(f"  {mutant.outcome}: {mutant}", flush=True)
    shutil.rmtree(COPIES)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
