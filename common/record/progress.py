"""Runs while they write: records as they come, how far a run is and how fast it goes.

Light: neither torch nor a model is loaded, and of a file only what is new is read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from common.record.terminal import format_cell

LEVELS = 4  # a sweep: sweep, seed, variant, stage
FRESH = 10  # logged steps from which the speed is taken


@dataclass
class Growing:
    """The records of a `.jsonl` file, of which only what is new is read.

    A resumed run puts a shorter file in its place; then everything is read again.
    """

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    changed: float = 0.0  # when the file was written to, in seconds since 1970
    _offset: int = 0
    _inode: int = 0

    def read(self) -> None:
        """Take in whole new lines; a line that is still being written waits."""
        try:
            with self.path.open("rb") as file:
                state = self.path.stat()
                if state.st_ino != self._inode or state.st_size < self._offset:
                    self.records, self._offset, self._inode = [], 0, state.st_ino
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.changed = state.st_mtime
        self.records += [json.loads(line) for line in whole.split(b"\n") if line.strip()]


@dataclass
class Run:
    """A run's folder as it was read last."""

    folder: Path
    name: str
    metrics: Growing
    samples: Growing
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path, name: str) -> "Run":
        """A run that may not have started."""
        files = (Growing(folder / "metrics.jsonl"), Growing(folder / "samples.jsonl"))
        return cls(folder, name, *files)

    def read(self) -> None:
        """Take in what is new."""
        self.metrics.read()
        self.samples.read()
        try:
            self.config = yaml.safe_load((self.folder / "config.yaml").read_text()) or {}
        except (FileNotFoundError, yaml.YAMLError):  # not there, or half written
            self.config = self.config or {}

    @property
    def step(self) -> int:
        """Optimiser steps made, as far as they were logged."""
        return int(self.metrics.records[-1]["step"]) if self.metrics.records else 0


def find_runs(places: Sequence[Path]) -> list[tuple[Path, str]]:
    """The run folders at or below the places, with their names, in the order they were begun.

    A place without any is a run that has not started.
    """
    found: dict[Path, str] = {}
    for place in places:
        levels = [place.glob("*/" * n + "config.yaml") for n in range(LEVELS + 1)]
        below = [file.parent for level in levels for file in level]
        stages = {run for run in below if (run / "metrics.jsonl").exists()}
        drivers = {folder for run in below for folder in run.parents} - stages  # of many runs
        below = [run for run in below if run not in drivers and not stages & set(run.parents)]
        below.sort(key=lambda run: ((run / "config.yaml").stat().st_mtime, str(run)))
        for run in below or [place]:
            shown = run.relative_to(place) if run != place else Path(place.resolve().name)
            found[run] = format_cell(shown.as_posix())
    return list(found.items())


def total_steps(run: Run) -> int | None:
    """Optimiser steps of the whole run, None as long as that cannot be told."""
    if (run.config.get("max_steps") or 0) > 0:
        return int(run.config["max_steps"])
    epochs = run.config.get("num_train_epochs")
    done = next((r for r in reversed(run.metrics.records) if r.get("epoch")), None)
    if not epochs or done is None:
        return None
    return max(run.step, round(float(done["step"] * epochs / done["epoch"])))


def seconds_per_step(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Wall time of a step lately, with what is done between steps; None before two logged steps."""
    timed = [r for r in records if r.get("elapsed_minutes") is not None][-FRESH:]
    if not timed or timed[0]["step"] >= timed[-1]["step"]:
        return None
    minutes = timed[-1]["elapsed_minutes"] - timed[0]["elapsed_minutes"]
    return float(60 * minutes / (timed[-1]["step"] - timed[0]["step"]))
