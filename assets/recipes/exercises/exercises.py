"""One-line changes of the code: what a stage measures before and after each.

    make demo                              # the models that the changes are tried on
    python -m assets.recipes.exercises.exercises        # all: 9 minutes on a CPU
    python -m assets.recipes.exercises.exercises 1 5    # some

Each change is made in a copy of the code. `docs/reading.md` has the questions. The runs are in
`output_dir`.
"""

import argparse
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
from experiments.runs.stages import ROOT, exit_with_status


@dataclass(frozen=True)
class Exercise:
    """A line of a file, what it becomes, and the run that shows the effect."""

    file: str
    old: str  # occurs once in the file
    new: str
    command: str  # of a stage, by its name in `COMMANDS`
    metrics: tuple[str, ...]
    question: str


RECIPE = yaml.safe_load(Path(__file__).with_name("demo.yaml").read_text())
COMMANDS: dict[str, str] = RECIPE["commands"]
EXERCISES = [Exercise(**entry) for entry in RECIPE["exercises"]]


def questions() -> str:
    """The exercises as a numbered list, each with its line and its command."""
    return "\n".join(
        f"{number}. `{one.file}`: `{one.old}` becomes `{one.new}`. {one.question}\n"
        f"   `python {COMMANDS[one.command]}`"
        for number, one in enumerate(EXERCISES, start=1)
    )


def last_values(run: Path, models: Path, command: str, change: Exercise | None) -> dict[str, Any]:
    """Last value of each metric of a run by a copy of the code."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
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
        shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, *command.split(), "--output_dir", str(run.resolve())]
        process = subprocess.run(words, cwd=tree, capture_output=True, text=True)
        if process.returncode:
            sys.exit(process.stderr)
    values: dict[str, Any] = {}
    for line in read_metrics(run):
        values |= line
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
    before: dict[str, dict[str, Any]] = {}  # by command
    for number in flags.numbers or every:
        one = EXERCISES[number - 1]
        name, command = one.command, COMMANDS[one.command]
        if name not in before:
            before[name] = last_values(flags.output_dir / name, flags.models, command, None)
        after = last_values(flags.output_dir / f"{number}", flags.models, command, one)
        for name in one.metrics:
            cells = (format_number(values[name]) for values in (before[one.command], after))
            print(f"| {number} | `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    exit_with_status(main)
