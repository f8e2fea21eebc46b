"""One-line changes of the code: what a stage measures before and after each.

    make demo                              # the models that the changes are tried on
    python -m experiments.evidence.exercises        # all: 8 minutes on a CPU
    python -m experiments.evidence.exercises 1 5    # some

Each change is made in a copy of the code. `docs/reading.md` has the questions. What was measured is
kept in `output_dir`, with the change, and with digests of the code and the models: the same command
resumes, and what has changed is measured again.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.record.run_folder import read_metrics
from common.record.terminal import format_number
from experiments.runs.stages import ROOT, exit_with_status, inputs, read_mark, write_mark


@dataclass(frozen=True)
class Exercise:
    """A line of a file, what it becomes, and the run that shows the effect."""

    file: str
    old: str  # occurs once in the file
    new: str
    command: str  # of a stage, by its name in `COMMANDS`
    metrics: tuple[str, ...]
    question: str


RECIPE = yaml.safe_load((ROOT / "assets" / "recipes" / "exercises" / "demo.yaml").read_text())
COMMANDS: dict[str, str] = RECIPE["commands"]
EXERCISES = [Exercise(**entry) for entry in RECIPE["exercises"]]


def questions() -> str:
    """The exercises as a numbered list, each with its line and its command."""
    return "\n".join(
        f"{number}. `{one.file}`: `{one.old}` becomes `{one.new}`. {one.question}\n"
        f"   `python {COMMANDS[one.command]}`"
        for number, one in enumerate(EXERCISES, start=1)
    )


def last_values(kept: Path, models: Path, command: str, change: Exercise | None) -> dict[str, Any]:
    """Last value of each metric of a run by a copy of the code, which `kept` then has."""
    common = b"".join(file.read_bytes() for file in sorted((ROOT / "common").rglob("*.py")))
    named = [str(ROOT / word) for word in command.split()]
    made_by = {
        "command": command,
        "change": [change.file, change.old, change.new] if change else [],
        "inputs": inputs([*named, *map(str, sorted(models.glob("*/model")))]),
        "code": hashlib.sha256(common).hexdigest(),
    }
    found = read_mark(kept.parent, kept.name) or {}
    if found.get("made_by") == made_by:
        return found
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        values: dict[str, Any] = {}
        for path in (*ROOT.glob("*.py"), ROOT / "common", ROOT / "assets" / "recipes"):
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            (tree / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            copy(path, tree / path.relative_to(ROOT))
        (tree / "output").mkdir()
        (tree / "output" / "demo").symlink_to(models.resolve())
        if change:
            code = tree / change.file
            if code.read_text().count(change.old) != 1:
                sys.exit(f"error: {change.file} must have this once: {change.old}")
            code.write_text(code.read_text().replace(change.old, change.new))
        words = [*command.split(), "--output_dir", "output/run"]
        run = subprocess.run([sys.executable, *words], cwd=tree, capture_output=True, text=True)
        if run.returncode:
            sys.exit(run.stderr)
        for line in read_metrics(tree / "output" / "run"):
            values |= line
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_mark(kept.parent, values | {"made_by": made_by}, kept.name)
    return values


def main() -> None:
    """Run exercises, and print a line of a table for each metric."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    every = range(1, len(EXERCISES) + 1)
    parser.add_argument("numbers", nargs="*", type=int, help=f"{every[0]} to {every[-1]}; all")
    parser.add_argument("--models", type=Path, default=ROOT / "output" / "demo", help="demo's runs")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "output" / "exercises")
    flags = parser.parse_args()
    if not set(flags.numbers) <= set(every):
        parser.error(f"the exercises are {every[0]} to {every[-1]}")
    for stage in ("sft", "reward"):
        if not (flags.models / stage / "model").is_dir():
            lacking = f"--models is {flags.models}, which has no {stage}/model"
            raise UserError(f"{lacking}; `make demo` writes it to output/demo.")
    print("| exercise | metric | before | after |\n|---|---|---|---|", flush=True)
    for number in flags.numbers or every:
        one = EXERCISES[number - 1]
        before, after = (
            last_values(flags.output_dir / f"{name}.json", flags.models, COMMANDS[one.command], to)
            for name, to in ((one.command, None), (f"{number}", one))
        )
        for name in one.metrics:
            cells = (format_number(values[name]) for values in (before, after))
            print(f"| {number} | `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    exit_with_status(main)
