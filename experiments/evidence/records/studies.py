"""Studies, the folders of `assets/recipes`: the parts that they record, and the records.

A study is a folder. Its `record.yaml` has the parts that `make results` makes, by name; its
`tables.py` has `TABLES`, a function for each place `<!-- NAME -->` of a page, and `FIGURES`, one
for each recorded part whose pictures are drawn anew.
"""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from common.config.recipes import read_recipe
from experiments.evidence.records import current
from experiments.runs.sweep.typed import built

ROOT = Path(__file__).resolve().parents[3]
STUDIES, RECORDS = ROOT / "assets" / "recipes", ROOT / "assets" / "results"
RECORD = "record.json"
STAGES = ("sft", "reward", "dpo", "grpo")


@dataclass(frozen=True)
class Recording:
    """A command, and what is kept of its results: an entry of a `record.yaml`."""

    name: str
    study: str
    command: str  # behind `python -m`; {out} is the part's folder
    keep: Sequence[str]  # globs in the folder; `printed.md` has what was printed
    keep_by: str = ""  # `module:function` that keeps more, of that folder in the record's
    folder: str = ""  # that it writes to, if not {out}
    needs: Sequence[str] = ()  # what only another part or a download makes
    reads: Sequence[str] = ()  # recipes that the command does not name
    code: Sequence[str] = ()  # Python files of its command that are in `tests`
    stages: Sequence[str] = STAGES  # whose trajectories decide the figures; none: the commit does
    threads: int = 1  # of each process
    takes_gpu: bool = False  # if there is one
    python: str = sys.executable  # or that of another environment, by its path in the project

    @property
    def out(self) -> str:
        """The folder of what it prints and writes."""
        return f"output/{self.name}"

    @property
    def words(self) -> str:
        """Its command with its folder."""
        return self.command.format(out=self.out)

    @property
    def settings(self) -> str:
        """All that names its recipes."""
        return " ".join((self.words, *self.reads))


@dataclass(frozen=True)
class Record:
    """`record.json` of a part: command, code, time and machine."""

    commands: Sequence[str]
    git_commit: str
    trajectories: current.Versions
    settings: str
    date: str
    minutes: float  # over all starts
    starts: int
    cpu: str
    cores: int
    python: str
    packages: dict[str, str]
    gpu: str | None = None
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)  # checksums of files, by path


def recordings() -> dict[str, Recording]:
    """All parts by name, each behind the parts whose output it needs."""
    by_name: dict[str, Recording] = {}
    for file in sorted(STUDIES.glob("*/record.yaml")):
        for name, values in read_recipe(str(file), typed=True).items():
            where = {"name": name, "study": file.parent.name}
            by_name[name] = built(Recording, where | values, str(file), name)

    def level(recording: Recording) -> int:
        needed = {path.split("/")[1] for path in recording.needs if path.startswith("output/")}
        return 1 + max((level(by_name[name]) for name in needed), default=0)

    return {each.name: each for each in sorted(by_name.values(), key=level)}


def functions(name: str) -> dict[str, Callable[[], Any]]:
    """What the `tables.py` of all studies have by a name, `TABLES` or `FIGURES`, in one."""
    every: dict[str, Callable[[], Any]] = {}
    for file in sorted(STUDIES.glob("*/tables.py")):
        module = importlib.import_module(f"assets.recipes.{file.parent.name}.tables")
        every |= getattr(module, name, {})
    return every


# ---- what is recorded ----------------------------------------------------------------------------


def read_record(recorded: str) -> Record | None:
    """The record of a part, if there is one."""
    values = read(f"{recorded}/{RECORD}")
    keys = [f.name for f in fields(Record)]
    return Record(**{key: values[key] for key in keys if key in values}) if values else None


def read(file: str) -> dict[str, Any]:
    """JSON among the records, by its path there; empty where there is none."""
    path = RECORDS / file
    return json.loads(path.read_text()) if path.is_file() else {}


def printed(file: str) -> str:
    """Text among the records."""
    return (RECORDS / file).read_text().strip()


def cells(text: str) -> list[list[str]]:
    """The cells of the Markdown table in a text: the line of its heads, then the others."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [heads, *rows]


def columns(name: str) -> dict[str, list[str]]:
    """The table that a command printed, by the heads of its columns."""
    heads, *rows = cells(printed(f"{name}/printed.md"))
    return dict(zip(heads, map(list, zip(*rows, strict=True)), strict=True))


def is_current(recording: Recording, record: Record, commit: str) -> bool:
    """Whether the record of a part is of this code: of its trajectories, or else of the commit."""
    if recording.stages or record.git_commit == commit:
        return not what_changed(recording, record)
    return False


def what_changed(recording: Recording, record: Record) -> str:
    """Changes since a part was recorded that move its figures; empty if there are none."""
    if current.have_moved(record.trajectories, current.trajectories(recording.stages, ROOT)):
        return "the golden trajectories"
    is_same = current.is_same_command(record.commands, recording.words)
    is_same &= record.settings == current.settings(recording.settings, ROOT)
    return "" if is_same else "the settings"
