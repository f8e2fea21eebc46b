"""Watch runs from another terminal: curves, time left and the last samples, as they are written.

    python -m common.record.watch output/demo/grpo       one run, also before it has started
    python -m common.record.watch output/demo            every run below, as stages begin
    python -m common.record.watch output/demo --once     one picture, for a script or a log

It only reads `metrics.jsonl`, `samples.jsonl` and `config.yaml`, so it may be started and ended at
any time, on any machine that sees the folder. It is no flag of a stage: it loads neither torch nor
a model, and is there in a tenth of a second. Ctrl-C ends it.
"""

import signal
import sys

if __name__ == "__main__":  # from here on: Ctrl-C may come while the rest is imported
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))

import argparse
import errno
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from common.record.folder import CONFIG, METRICS, SAMPLES, read_config
from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX, recorded
from common.record.jsonl import read_jsonl
from common.record.terminal import format_cell, format_number, wrapped_table

LEVELS = 4  # of folders below a sweep: seed, variant, stage
FRESH = 10  # logged steps from which the speed is taken
BLOCKS = "▁▂▃▄▅▆▇█"
DONE, LEFT = "━─"  # steps
PLAIN = str.maketrans(BLOCKS + DONE + LEFT, "_.:-=+*##.")  # where the terminal has only ASCII
BAR_WIDTH, NARROW = 30, 80  # characters; a window that is narrower gets no bar and no ranges
LOG_SECONDS = 30.0  # between two pictures off a terminal
NUM_SAMPLES = 4
# What is shown, in this order, as far as it was logged and the window is high enough.
SHOWN = (
    *("loss", "eval_loss", "accuracy", "eval_accuracy", "reward_margin"),
    *("reward", "eval_reward", FUNCTION_PREFIX, "kl", "completion_length", "stop_rate", "entropy"),
    *("chosen_logp", "rejected_logp", "grad_norm", "learning_rate", "tokens_per_second"),
    *("step_seconds", "peak_memory_gb", LOGGED_PREFIX),
)


# --- what the files say ---


@dataclass
class Run:
    """A run's folder as it was read last; the run may not have started."""

    folder: Path
    name: str
    metrics: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    changed: float = 0.0  # when metrics or samples were written to, in seconds since 1970
    _seen: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def read(self) -> None:
        """Read the files that have changed, but for a line that is still being written."""
        for file in (METRICS, SAMPLES, CONFIG):
            with suppress(FileNotFoundError, ValueError):  # a config may be half written
                state = (self.folder / file).stat()
                now = (state.st_ino, state.st_size, state.st_mtime_ns)
                if now == self._seen.get(file):
                    continue
                if file == CONFIG:
                    self.config = read_config(self.folder) or self.config
                else:
                    setattr(self, file.removesuffix(".jsonl"), read_jsonl(self.folder / file))
                    self.changed = max(self.changed, state.st_mtime)
                self._seen[file] = now

    @property
    def step(self) -> int:
        """Optimiser steps made, as far as they were logged."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def find_runs(places: Sequence[Path]) -> list[tuple[Path, str]]:
    """The run folders at or below the places, with their names, in the order they were begun.

    A place without any is a run that has not started.
    """
    found: dict[Path, str] = {}
    for place in places:
        below = [f.parent for n in range(LEVELS + 1) for f in place.glob("*/" * n + CONFIG)]
        stages = {run for run in below if (run / METRICS).exists()}
        drivers = {folder for run in below for folder in run.parents} - stages  # of many runs
        below = [run for run in below if run not in drivers and not stages & set(run.parents)]
        below.sort(key=lambda run: ((run / CONFIG).stat().st_mtime, str(run)))
        for run in below or [place]:
            shown = run.relative_to(place) if run != place else Path(place.resolve().name)
            found[run] = format_cell(shown.as_posix())
    return list(found.items())


def total_steps(run: Run) -> int | None:
    """Optimiser steps of the whole run, None as long as that cannot be told."""
    if (run.config.get("max_steps") or 0) > 0:
        return int(run.config["max_steps"])
    epochs = run.config.get("num_train_epochs")
    done = next((r for r in reversed(run.metrics) if r.get("epoch")), None)
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


def duration(seconds: float) -> str:
    """A time that people read: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


# --- the picture ---


def progress(run: Run, now: float) -> tuple[str, str]:
    """A bar of the steps made, "" without their number; then steps, speed, time left, last line."""
    if not run.metrics:
        if (run.folder / "results.json").is_file():
            return "", "evaluated: see its report.html"
        return "", "no line yet" if run.config else "not started"
    total, pace, bar = total_steps(run), seconds_per_step(run.metrics), ""
    parts = [f"step {run.step:,}" + (f" of {total:,}" if total else "")]
    if pace is not None:
        parts.append(f"{format_number(pace)} s per step")
    minutes = run.metrics[-1].get("elapsed_minutes")
    if minutes is not None:
        parts.append(f"{duration(60 * minutes)} so far")
    if total:
        num_done = round(BAR_WIDTH * min(1, run.step / total))
        bar = DONE * num_done + LEFT * (BAR_WIDTH - num_done)
    if total and run.step >= total:
        return bar, ", ".join([*parts, "all steps made"])
    if total and pace is not None:
        parts.append(f"{duration(pace * (total - run.step))} left")
    return bar, ", ".join([*parts, f"last line {duration(max(0.0, now - run.changed))} ago"])


def sparkline(steps: Sequence[int], values: Sequence[float], width: int) -> str:
    """Values as a row of blocks from the lowest to the highest, over the steps from 0 to the last.

    A column is the mean of its steps, or as high as the one before where it has none. Values that
    are all equal are a line in the middle.
    """
    columns: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        columns.setdefault(min(width - 1, step * width // max(1, steps[-1])), []).append(value)
    means = {place: sum(column) / len(column) for place, column in columns.items()}
    low, high = min(means.values(), default=0.0), max(means.values(), default=0.0)
    line, top = " ", len(BLOCKS) - 1
    for place in range(width):
        share = (means.get(place, low) - low) / (high - low) if high > low else 0.5
        line += BLOCKS[int(top * share + 0.5)] if place in means else line[-1]
    return line[1:]


def curve(run: Run, name: str, width: int) -> tuple[str, str, str, str]:
    """Of a metric its name, sparkline, last value, lowest and highest."""
    logged = [(record["step"], record[name]) for record in run.metrics if name in record]
    known = [(step, float(value)) for step, value in logged if value is not None]  # null: infinite
    values = [value for _, value in known]
    line = sparkline([step for step, _ in known], values, width)
    extent = f"from {format_number(min(values))} to {format_number(max(values))}" if known else ""
    # Names of reward functions hold anything.
    return format_cell(name), line, f"{format_cell(logged[-1][1]):>9}", extent


def last_samples(run: Run) -> list[dict[str, Any]]:
    """The rows of the last table of samples, of other prompts as far as there are any."""
    rows = [row for row in run.samples if row["step"] == run.samples[-1]["step"]]
    distinct = list({row.get("prompt"): row for row in reversed(rows)}.values())[::-1]
    return [
        {k: v for k, v in row.items() if k != "step" and not isinstance(v, list | dict)}
        for row in (distinct if len(distinct) > 1 else rows)[:NUM_SAMPLES]
    ]


def picture(runs: Sequence[Run], width: int, height: int, now: float) -> str:
    """A line for every run, and everything about the one that wrote last."""
    current = max(runs, key=lambda run: run.changed)
    before = [run for run in runs if run is not current][: max(0, height - 20)]
    names = recorded(current.metrics, SHOWN)
    heads: Any = [(run.name, *progress(run, now)) for run in [*before, current]]
    curves: Any = [curve(current, name, max(6, width // 3)) for name in names]
    if width < NARROW:
        heads, curves = [(name, told) for name, _, told in heads], [row[:3] for row in curves]
    lines = aligned(heads, width)
    for_samples = min(3 + 4 * NUM_SAMPLES, height // 2) if current.samples else 0
    lines += aligned(curves, width)[: max(0, height - len(lines) - for_samples)]
    if current.samples:
        table = wrapped_table(last_samples(current), width, max_lines=3)
        lines += ["", f"samples at step {current.samples[-1]['step']:,}", *table.split("\n")]
    return "\n".join(lines[:height])


def aligned(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of columns, cut at the width; names, in the first one, at a third of it."""
    rows = [(row[0][: width // 3], *row[1:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return [line[:width].rstrip() for line in lines]


# --- the program ---


def watch(places: Sequence[Path], interval: float, once: bool, stream: TextIO) -> None:
    """Show the runs until Ctrl-C, or once; the last picture stays in the terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    interactive = stream.isatty() and not once
    encoding = stream.encoding or "ascii"
    runs: dict[Path, Run] = {}
    text, shown = "", ""
    screen = Live(console=Console(file=stream), screen=True, auto_refresh=False)
    try:
        with screen if interactive else nullcontext():
            while True:
                present = [runs.setdefault(f, Run(f, name)) for f, name in find_runs(places)]
                for run in present:
                    run.read()
                size = shutil.get_terminal_size((100, 40))
                text = picture(present, size.columns - 1, size.lines - 1, time.time())
                if "utf" not in encoding.lower():
                    text = text.translate(PLAIN)
                text = text.encode(encoding, "replace").decode(encoding)
                if interactive:
                    screen.update(Text(text, no_wrap=True), refresh=True)
                elif text != shown:
                    print(text if once else f"{text}\n", file=stream, flush=True)
                    shown = text
                if once:
                    return
                time.sleep(interval if interactive else max(interval, LOG_SECONDS))
    finally:
        if interactive:
            print(text, file=stream, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and watch."""
    parser = argparse.ArgumentParser(
        prog="python -m common.record.watch",
        description="Watch runs as they write.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", type=Path, help="output_dir of runs, or above them")
    parser.add_argument("--once", action="store_true", help="show what there is and end")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    given = parser.parse_args(arguments)
    for folder in given.folders:
        if folder.is_file():
            parser.error(f"{folder} is a file; name the output_dir of a run, or a folder above it.")
    if not 0 < given.interval < math.inf:
        parser.error(f"--interval is {given.interval}; it must be above 0 seconds.")
    try:
        watch(given.folders, given.interval, given.once, sys.stdout)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        # The terminal was closed, or who read a pipe has enough; Python writes what is left, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
