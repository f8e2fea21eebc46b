"""How many small changes of a module do its tests notice?

    make mutants MODULES="losses grpo"              # 60 places of each module or room, drawn
    make mutants MODULES=losses FLAGS="--places 0"  # every place
    python -m tests.mutants --seed 7 model.optim    # other ones

A mutant is a module with one place changed: an operator, a comparison, a number, a condition, a
call left out or exchanged. Tests that reach the place run until one fails, in a copy of the
project: first those of the files about the module (`tests/map.py`), then of the others of their
rooms, then those of whole stages. A survivor shows that a test is missing, or it changes nothing:
then it is listed in `equivalent_mutants.json` with the reason. The exit status is 1 if fewer than
97% of those that are not listed are noticed.

The lines that each test reaches are traced once, and kept in `output/mutants.json`. A mutant inside
a function is then a fork with the function's code exchanged; any other one imports everything anew.
Both are in the file too, for processes that a test starts.
"""

import argparse
import ast
import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import json
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, NoReturn, TypeVar

import pytest

from tests import map as test_map
from tests.support.reached import stop as stop_watching
from tests.support.reached import watch

ROOT = test_map.ROOT
COPIES = ROOT / "output" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.json"
OF_STAGES = ("stages/test_golden.py", "stages/test_mistakes.py")
LEAST = 0.97  # of the mutants that change something
SHARED = ("torch", "numpy", "scipy.stats", "transformers", "datasets", "hypothesis")
SPARE_SECONDS = 20  # of a test with a change, over five times what it takes without
SURVIVED, EQUAL = "survived", "equivalent"
NOT_PREPARED = 99  # exit status of a fork
TERMINAL = os.dup(1)  # forks print elsewhere
TIERS = ("own", "room", "stages")
NOTES = ROOT / "output" / "mutants.json"  # what tests reach, by file
NUM_SHARES = 6  # of the files, to note that
NOTED, OUTCOMES, LOG = Path("noted.json"), Path("outcomes.json"), Path("tests.log")  # in a copy
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
OPPOSITES = {name: other for pair in PAIRS for name, other in (pair, pair[::-1])}
OPPOSITES |= {"exp": "expm1", "log": "log1p", "zeros": "ones", "zeros_like": "ones_like"}
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
    outcome: str = ""  # the tier of the test that noticed it, or survived

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
    tree = ast.parse((ROOT / path_of(module)).read_text())
    found: list[Mutant] = []
    for mutant, node, changed in changed_places(module, tree):
        text = ast.unparse(ast.fix_missing_locations(ReplaceNode(node, changed).visit(tree)))
        ReplaceNode(changed, node).visit(tree)
        found.append(replace(mutant, text=text))
    return sorted(found, key=lambda mutant: mutant.line)


def keys_of(module: str) -> set[Key]:
    """Those of its mutants, without their texts, which take most of the time."""
    tree = ast.parse((ROOT / path_of(module)).read_text())
    return {mutant.key for mutant, _, _ in changed_places(module, tree)}


def changed_places(module: str, tree: ast.AST) -> Iterator[tuple[Mutant, ast.AST, ast.AST]]:
    """Mutants without their texts, each with the node that it changes and what stands there."""
    seen: Counter[Key] = Counter()
    for function, node in places(tree):
        for changed in changes(node):
            after = ast.unparse(changed)
            mutant = Mutant(module, function, ast.unparse(node), after, line=node.lineno)
            yield replace(mutant, nth=seen[mutant.key]), node, changed
            seen[mutant.key] += 1


class ReplaceNode(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """The tree with the new node."""
        return self.new if node is self.old else self.generic_visit(node)


def places(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Expressions and statements that run, each with the name of the function around it.

    Left out are annotations, what is imported for them, decorators, what only a message says
    (f-strings and `raise`), and `strict` of `zip`, which guards against our own mistakes.
    """
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.Raise, ast.JoinedStr)):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict" and is_zip(tree):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            inside = function
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{function}.{node.name}".lstrip(".")
            if isinstance(node, (ast.expr, ast.stmt)):
                yield inside, node
            yield from places(node, inside)


def is_zip(node: ast.AST) -> bool:
    """Whether this is a call of `zip`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"


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
        case ast.Name(id=name) if name in OPPOSITES:
            yield like(node, func=like(node.func, id=OPPOSITES[name]))
        case ast.Attribute(value=value, attr=name):
            if name in OPPOSITES:
                yield like(node, func=like(node.func, attr=OPPOSITES[name]))
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


class Test(NamedTuple):
    """Seconds and reached lines of a test in the unchanged project."""

    seconds: float
    reaches: dict[str, list[int]]  # lines by module's path
    tier: int = 0  # of `TIERS`


class Recorder:
    """Pytest's plugin that notes which lines of modules each test reaches, also by its fixtures."""

    def __init__(self) -> None:
        self.reached, self.places = watch(sorted(Path("common").rglob("*.py")), Path.cwd())
        self.of_fixtures: dict[pytest.FixtureDef[Any], set[int]] = {}
        self.fixture_seconds: Counter[pytest.FixtureDef[Any]] = Counter()
        self.noted: dict[str, tuple[float, dict[str, list[int]]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """A fixture's lines and seconds count for all tests that use it."""
        before, start = self.reached.take(), time.monotonic()
        try:
            return (yield)
        finally:
            self.fixture_seconds[fixturedef] += time.monotonic() - start
            self.of_fixtures.setdefault(fixturedef, set()).update(self.reached.take())
            for place in before:
                self.reached.hits[place] = 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Iterator[None]:
        """Note a test."""
        start = time.monotonic()
        self.reached.take()
        try:
            return (yield)
        finally:
            places, seconds = self.reached.take(), time.monotonic() - start
            for definitions in item._fixtureinfo.name2fixturedefs.values():
                for one in definitions:  # this test may be the one that sets it up
                    places |= self.of_fixtures.get(one, set())
                    seconds += self.fixture_seconds[one]
            lines: dict[str, list[int]] = {}
            for path, line in (self.places[i] for i in sorted(places)):
                lines.setdefault(path, []).append(line)
            self.noted[item.nodeid] = (seconds, lines)

    def pytest_sessionfinish(self) -> None:
        NOTED.write_text(json.dumps(self.noted))


class Chosen:
    """Pytest's plugin that runs some tests, each for at most some seconds."""

    def __init__(self, tests: dict[str, Test]) -> None:
        self.tests = tests
        self.tier = mmap.mmap(-1, 1)  # of the test that runs, shared with forks

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only the chosen ones, in their order."""
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[name] for name in self.tests]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test; what is late ends the process."""
        test = self.tests[item.nodeid]
        self.tier[0] = test.tier
        signal.setitimer(signal.ITIMER_REAL, SPARE_SECONDS + 5 * test.seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


class Session:
    """Pytest's plugin that has collected the tests and runs them on forks."""

    def __init__(self, mutants: list[Mutant], tests: dict[str, Test]) -> None:
        """Mutants inside functions, and the tests that may notice them."""
        self.mutants, self.tests = mutants, tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Try the mutants; on a fork, go on to pytest's own loop over the tests of one."""
        outcomes = []
        for mutant in self.mutants:
            chosen = Chosen(reaching(mutant, self.tests))
            with written(mutant):
                pid = fork()
                if not pid:
                    self.prepare(session, mutant, chosen)
                    return None
                status = ending(pid)
            if os.waitstatus_to_exitcode(status) == NOT_PREPARED:
                return True
            outcomes.append(TIERS[chosen.tier[0]] if status else SURVIVED)
            say(mutant, outcomes[-1])
        OUTCOMES.write_text(json.dumps(outcomes))
        return True

    def prepare(self, session: pytest.Session, mutant: Mutant, chosen: Chosen) -> None:
        """Make this fork that of a mutant; what fails here has nothing to do with the tests."""
        try:
            replace_code(mutant)
            chosen.pytest_collection_modifyitems(session.items)
            session.config.pluginmanager.register(chosen)
        except Exception:
            traceback.print_exc()
            leave(NOT_PREPARED)


@functools.cache
def near_files(module: str) -> dict[str, int]:
    """Tiers of test files: about the module, others of their rooms, of whole stages."""
    own = {*test_map.files_of_modules()[module]}
    rooms = {(ROOT / "tests" / file).parent for file in own - {*OF_STAGES} or own}
    paths = [path.relative_to(ROOT / "tests") for room in rooms for path in room.glob("test_*.py")]
    nearness = dict.fromkeys(map(str, sorted(paths)), 1) | dict.fromkeys(OF_STAGES, 2)
    nearness |= dict.fromkeys(sorted(own), 0)
    return {f"tests/{file}": tier for file, tier in nearness.items()}


def read_tests(files: Collection[str]) -> dict[str, Test]:
    """Tests of files by their names, those of quick files first, then those that are quick."""
    noted = json.loads(NOTES.read_text())
    tests = {name: Test(*notes) for file in files for name, notes in noted[file][1].items()}
    seconds: Counter[str] = Counter()
    for name, test in tests.items():
        seconds[file_of(name)] += test.seconds

    def order(name: str) -> tuple[float, str, float]:
        return seconds[file_of(name)], file_of(name), tests[name].seconds

    return {name: tests[name] for name in sorted(tests, key=order)}


def note_tests(files: Collection[str], pool: ProcessPoolExecutor) -> None:
    """Have `NOTES` say what the tests of files reach, of this state of the project."""
    noted = json.loads(NOTES.read_text()) if NOTES.exists() else {}
    patterns = ("*.py", "common/**/*.py", "tests/*.py", "tests/support/*.py")
    patterns += ("experiments/**/*.py", "assets/recipes/**/*.*")
    shared = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    shared = [path for path in shared if not path.name.startswith("test_")]
    hashed = hashlib.sha256(b"".join(path.read_bytes() for path in shared))

    def state(file: str) -> str:
        own = hashed.copy()
        own.update((ROOT / file).read_bytes())
        return own.hexdigest()

    missing = [file for file in files if noted.get(file, [""])[0] != state(file)]
    shares = [share for i in range(NUM_SHARES) if (share := missing[i::NUM_SHARES])]
    for future in as_completed([pool.submit(traced, share) for share in shares]):
        noted |= {file: [state(file), tests] for file, tests in future.result().items()}
        NOTES.write_text(json.dumps(noted))


def traced(files: list[str]) -> dict[str, dict[str, Any]]:
    """What the tests of files reach, by file and name.

    Raises:
        RuntimeError: a test fails.
    """
    NOTED.unlink(missing_ok=True)
    status = run_pytest(files, Recorder)
    stop_watching(Path.cwd())
    if status:
        raise RuntimeError(f"without a change:\n{LOG.read_text()[-3000:]}")
    found: dict[str, dict[str, Any]] = {file: {} for file in files}
    for name, notes in json.loads(NOTED.read_text()).items():
        found[file_of(name)][name] = notes
    return found


def file_of(test: str) -> str:
    return test.partition("::")[0]


def reaching(mutant: Mutant, tests: dict[str, Test]) -> dict[str, Test]:
    """The tests that may notice a mutant, those that are near first, with their tiers.

    A mutant outside of functions may be noticed by every near one: its lines run at import.
    """
    path, nearness = path_of(mutant.module), near_files(mutant.module)
    start, end = statement(mutant)
    is_inside = bool(outermost(mutant))
    near = {
        name: test._replace(tier=nearness[file_of(name)])
        for name, test in tests.items()
        if file_of(name) in nearness
        and (not is_inside or any(start <= line <= end for line in test.reaches.get(path, [])))
    }
    return {name: near[name] for name in sorted(near, key=lambda name: near[name].tier)}


def statement(mutant: Mutant) -> tuple[int, int]:
    """First and last line of the smallest statement around a mutant, of its head if it has one."""
    around = []
    for node in ast.walk(ast.parse((ROOT / path_of(mutant.module)).read_text())):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or 0
            if node.lineno <= mutant.line <= end:
                around.append((end - node.lineno, node.lineno, end))
    return min(around)[1:]


def outermost(mutant: Mutant) -> str:
    """Qualified name of the outermost function whose body has the mutant, empty if none."""
    scopes: list[tuple[str, ast.AST]] = [
        ("", ast.parse((ROOT / path_of(mutant.module)).read_text()))
    ]
    while scopes:
        prefix, scope = scopes.pop()
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef):
                start, end = node.body[0].lineno, node.end_lineno or 0
                if start <= mutant.line <= end:
                    return prefix + node.name
    return ""


def is_replaceable(mutant: Mutant) -> bool:
    """Whether the code of an imported function can become that of the mutant."""
    name = outermost(mutant)
    sources = ((ROOT / path_of(mutant.module)).read_text(), mutant.text)
    old, new = (codes_of(source, path_of(mutant.module), name) for source in sources)
    return len(old) == len(new) == 1 and old[0].co_freevars == new[0].co_freevars


def codes_of(source: str, path: str, name: str) -> list[CodeType]:
    """Code of the functions with a qualified name, one if no other has it."""
    codes = [compile(source, path, "exec")]
    for part in name.split("."):
        inside = [constant for code in codes for constant in code.co_consts]
        codes = [one for one in inside if isinstance(one, CodeType) and one.co_name == part]
    return codes


def replace_code(mutant: Mutant) -> None:
    """Give the imported functions the mutant's code."""
    name, path = outermost(mutant), str(Path(path_of(mutant.module)).resolve())
    (new,) = codes_of(mutant.text, path, name)
    gc.unfreeze()  # `get_objects` leaves out what the tests' session has frozen
    for function in gc.get_objects():
        if type(function) is FunctionType:  # a lazy object may warn of `isinstance`
            code = function.__code__
            places = function.__qualname__, code.co_name, code.co_filename  # not of a wrapper
            if places == (name, new.co_name, path):
                function.__code__ = new


@contextlib.contextmanager
def written(mutant: Mutant) -> Iterator[None]:
    """The mutant in its file, for processes that are started."""
    file, writer = Path(path_of(mutant.module)), os.getpid()
    source = file.read_text()
    file.write_text(mutant.text)
    try:
        yield
    finally:
        if os.getpid() == writer:  # a fork leaves this block before its tests run
            file.write_text(source)


def fork() -> int:
    """As `os.fork`; the new process leads a group."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
    return pid


def ending(pid: int) -> int:
    """The status with which a fork ends; then its own forks end."""
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return status


def run_pytest(files: Sequence[str], plugin: Callable[[], object]) -> int:
    """Run test files on a fork, with the plugin made there, until one fails; its status."""
    pid = fork()
    if not pid:
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor, new in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(new, descriptor)
        arguments = [*files, "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
        arguments.append("--hypothesis-profile=no_shrinking")
        leave(pytest.main(arguments, plugins=[plugin()]))
    return ending(pid)


def leave(status: int) -> NoReturn:
    """End a fork; its servers end when their pipe closes."""
    sys.stdout.flush()
    os._exit(status)


def workers(number: int) -> ProcessPoolExecutor:
    """Forks in copies of the project. Tests may start processes there, unlike in a `Pool`'s."""
    return ProcessPoolExecutor(number, multiprocessing.get_context("fork"), in_copy)


def in_copy() -> None:
    """Let this process work in a copy of the project of its own."""
    place = COPIES / str(os.getpid())
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*NOT_COPIED))
    os.chdir(place)
    sys.path[:] = [str(place), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # the copy's are imported


def tried(drawn: list[Mutant]) -> list[Mutant]:
    """The mutants with their outcomes.

    Raises:
        RuntimeError: mutants or tests could not be prepared.
    """
    if not drawn:
        return []
    tests = read_tests({file for mutant in drawn for file in near_files(mutant.module)})
    OUTCOMES.unlink(missing_ok=True)
    inside, outcomes = [mutant for mutant in drawn if is_replaceable(mutant)], {}
    if inside:
        run_pytest(sorted({*map(file_of, tests)}), lambda: Session(inside, tests))
        if not OUTCOMES.exists():
            raise RuntimeError(f"mutants could not be tried:\n{LOG.read_text()[-3000:]}")
        outcomes = dict(zip(inside, json.loads(OUTCOMES.read_text()), strict=True))
    for mutant in drawn:
        if mutant not in outcomes:
            chosen = Chosen(reaching(mutant, tests))
            files = sorted({*map(file_of, chosen.tests)})
            with written(mutant):
                status = files and run_pytest(files, lambda chosen=chosen: chosen)
            outcomes[mutant] = TIERS[chosen.tier[0]] if status else SURVIVED
            say(mutant, outcomes[mutant])
    return [replace(mutant, outcome=outcomes[mutant]) for mutant in drawn]


def say(mutant: Mutant, outcome: str) -> None:
    """Print a mutant that the nearest tests have not noticed."""
    if outcome != "own":
        os.write(TERMINAL, f"{outcome}: {mutant}\n".encode())


# ---- the table -----------------------------------------------------------------------------------


def equivalent() -> dict[Key, str]:
    """Reasons why mutants change nothing."""
    entries = json.loads(EQUIVALENT.read_text())
    return {tuple(entry[name] for name in KEY): entry["why"] for entry in entries}


def modules_of(name: str) -> list[str]:
    """Dotted names of a module of common/, or of all modules of a room of it."""
    name = f"common.{name}"
    return [module for module in test_map.files_of_modules() if f"{module}.".startswith(f"{name}.")]


def main() -> None:
    """Draw mutants of each module, run their tests, print a table and the survivors."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("modules", nargs="+", help="as losses or model.optim, or a room, as grpo")
    parser.add_argument("--places", type=int, default=60, help="of each of these; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.modules if not modules_of(name)]:
        parser.error(f"no module {', '.join(unknown)} in common/")
    for name in SHARED:
        importlib.import_module(name)  # once, for all forks; they may not find a pool of threads
    sys.dont_write_bytecode = True  # a file may change twice within its time's digits
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # and in processes that are started
    shutil.rmtree(COPIES, ignore_errors=True)
    drawn, known = {}, equivalent()
    for name in arguments.modules:
        found = [mutant for module in modules_of(name) for mutant in mutants(module)]
        random.Random(arguments.seed).shuffle(found)
        drawn[name] = found[: arguments.places or None]
    left = [mutant for found in drawn.values() for mutant in found if mutant.key not in known]
    shares = [left[i :: arguments.processes] for i in range(arguments.processes)]
    with workers(arguments.processes) as pool:
        try:
            note_tests(sorted({file for one in left for file in near_files(one.module)}), pool)
            done = {one.key: one.outcome for share in pool.map(tried, shares) for one in share}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # without the shares that have not begun
            raise
    shutil.rmtree(COPIES)
    is_good = True
    print(f"\n{'module':34} own room stages survived equivalent of")
    for name, found in drawn.items():
        counts = Counter(done.get(mutant.key, EQUAL) for mutant in found)
        is_good &= counts[SURVIVED] <= (1 - LEAST) * (len(found) - counts[EQUAL])
        cells = zip((*TIERS, SURVIVED, EQUAL), (3, 4, 6, 8, 10), strict=True)
        print(f"{name:34}", *(f"{counts[cell]:{width}}" for cell, width in cells), len(found))
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
