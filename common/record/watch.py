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
from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX, PREFIXES
from common.record.jsonl import read_jsonl
from common.record.terminal import format_cell, format_number, rendered, wrapped_table

LEVELS = 4  # of folders below a sweep: seed, variant, stage
FRESH = 10  # logged steps from which the speed is taken
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
BAR, PLAIN_BAR = ("━", "─"), ("#", ".")  # steps made, steps left
BAR_WIDTH, NARROW = 30, 80  # characters; a window that is narrower gets no bar and no ranges
LOG_SECONDS = 30.0  # between two pictures off a terminal
NUM_SAMPLES = 4
# What is shown, in this order, as far as it was logged and the window is high enough.
SHOWN = (
    *("loss", "eval_loss", "accuracy", "eval_accuracy", "reward_margin"),
    *("reward", FUNCTION_PREFIX, "kl", "completion_length", "stop_rate", "entropy"),
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
        for name, file in (("metrics", METRICS), ("samples", SAMPLES), ("config", CONFIG)):
            path, is_config = self.folder / file, name == "config"
            with suppress(FileNotFoundError, ValueError):  # a config may be half written
                state = path.stat()
                now = (state.st_ino, state.st_size, state.st_mtime_ns)
                if now != self._seen.get(name):
                    if is_config:
                        self.config = read_config(self.folder) or self.config
                    else:
                        setattr(self, name, read_jsonl(path))
                        self.changed = max(self.changed, state.st_mtime)
                    self._seen[name] = now

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
        levels = [place.glob("*/" * n + CONFIG) for n in range(LEVELS + 1)]
        below = [file.parent for level in levels for file in level]
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


def progress(run: Run, now: float) -> str:
    """Steps, speed, time left, and when the last line came."""
    if not run.metrics:
        if (run.folder / "results.json").is_file():
            return "evaluated: see its report.html"
        return "no line yet" if run.config else "not started"
    total, pace = total_steps(run), seconds_per_step(run.metrics)
    parts = [f"step {run.step:,}" + (f" of {total:,}" if total else "")]
    if pace is not None:
        parts.append(f"{format_number(pace)} s per step")
    minutes = run.metrics[-1].get("elapsed_minutes")
    if minutes is not None:
        parts.append(f"{duration(60 * minutes)} so far")
    if total and run.step >= total:
        return ", ".join([*parts, "all steps made"])
    if total and pace is not None:
        parts.append(f"{duration(pace * (total - run.step))} left")
    return ", ".join([*parts, f"last line {duration(max(0.0, now - run.changed))} ago"])


def progress_bar(run: Run, plain: bool) -> str:
    """The share of the steps that are made, "" as long as that cannot be told."""
    total, (done, left) = total_steps(run), PLAIN_BAR if plain else BAR
    if not total or not run.metrics:
        return ""
    num_done = round(BAR_WIDTH * min(1, run.step / total))
    return done * num_done + left * (BAR_WIDTH - num_done)


def metric_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was logged of `SHOWN`, in that order; a prefix stands for all names behind it."""
    present = sorted({name for record in records for name in record})
    return [
        name
        for wanted in SHOWN
        for name in present
        if name == wanted or (wanted in PREFIXES and name.startswith(wanted))
    ]


def sparkline(
    steps: Sequence[int], values: Sequence[float], width: int, blocks: str = BLOCKS
) -> str:
    """Values as a row of blocks from the lowest to the highest, over the steps from 0 to the last.

    A column is the mean of its steps, or as high as the one before where it has none. Values that
    are all equal are a line in the middle.
    """
    columns: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        columns.setdefault(min(width - 1, step * width // max(1, steps[-1])), []).append(value)
    means = {place: sum(column) / len(column) for place, column in columns.items()}
    low, high = min(means.values(), default=0.0), max(means.values(), default=0.0)
    top, block, line = len(blocks) - 1, " ", ""
    for place in range(width):
        if place in means:
            is_flat = high == low
            block = blocks[
                top // 2 if is_flat else round(top * (means[place] - low) / (high - low))
            ]
        line += block
    return line


def curve(run: Run, name: str, width: int, plain: bool) -> tuple[str, str, str, str]:
    """Of a metric its name, sparkline, last value, lowest and highest."""
    logged = [(record["step"], record[name]) for record in run.metrics if name in record]
    known = [(step, value) for step, value in logged if value is not None]  # null: not finite
    steps, values = [step for step, _ in known], [float(value) for _, value in known]
    line = sparkline(steps, values, width, PLAIN_BLOCKS if plain else BLOCKS)
    extent = f"from {format_number(min(values))} to {format_number(max(values))}" if known else ""
    # Names of reward functions hold anything.
    return format_cell(name), line, format_cell(logged[-1][1]), extent


def last_samples(run: Run) -> list[dict[str, Any]]:
    """The rows of the last table of samples, of other prompts as far as there are any."""
    rows = [row for row in run.samples if row["step"] == run.samples[-1]["step"]]
    distinct = list({row.get("prompt"): row for row in reversed(rows)}.values())[::-1]
    return [
        {k: v for k, v in row.items() if k != "step" and not isinstance(v, list | dict)}
        for row in (distinct if len(distinct) > 1 else rows)[:NUM_SAMPLES]
    ]


def picture(runs: Sequence[Run], width: int, height: int, now: float, plain: bool) -> str:
    """A line for every run, and everything about the one that wrote last."""
    from rich.table import Table

    def grid(num_columns: int) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(num_columns):
            table.add_column(no_wrap=True, overflow="crop")
        return table

    is_wide = width >= NARROW
    current = max(runs, key=lambda run: run.changed)
    before = [run for run in runs if run is not current]
    heads = grid(3 if is_wide else 2)
    heads.columns[0].max_width = width // 3
    for run in [*before[: max(0, height - 20)], current]:
        bar = [progress_bar(run, plain)] if is_wide else []
        heads.add_row(run.name, *bar, progress(run, now))
    lines = rendered(heads, width).split("\n")
    curves = grid(4 if is_wide else 3)
    curves.columns[0].max_width = width // 3
    curves.columns[2].justify = "right"
    for name in metric_names(current.metrics):
        room = max(6, width // 3)
        curves.add_row(*curve(current, name, room, plain)[: len(curves.columns)])
    for_samples = min(3 + 4 * NUM_SAMPLES, height // 2) if current.samples else 0
    if curves.row_count:
        lines += rendered(curves, width).split("\n")[: max(0, height - len(lines) - for_samples)]
    if current.samples:
        table = wrapped_table(last_samples(current), width, max_lines=3)
        lines += ["", f"samples at step {current.samples[-1]['step']:,}", *table.split("\n")]
    return "\n".join(lines[:height])


# --- the program ---


def watch(places: Sequence[Path], interval: float, once: bool, stream: TextIO) -> None:
    """Show the runs until Ctrl-C, or once; the last picture stays in the terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    interactive = stream.isatty() and not once
    encoding = stream.encoding or "ascii"
    plain = "utf" not in encoding.lower()
    runs: dict[Path, Run] = {}
    text, shown, shown_at = "", "", -math.inf
    screen = Live(console=Console(file=stream), screen=True, auto_refresh=False)
    try:
        with screen if interactive else nullcontext():
            while True:
                present = [runs.setdefault(f, Run(f, name)) for f, name in find_runs(places)]
                for run in present:
                    run.read()
                now, size = time.time(), shutil.get_terminal_size((100, 40))
                text = picture(present, size.columns - 1, size.lines - 1, now, plain)
                text = text.encode(encoding, "replace").decode(encoding)
                if interactive:
                    screen.update(Text(text, no_wrap=True), refresh=True)
                elif once or (text != shown and now - shown_at >= LOG_SECONDS):
                    print(text if once else f"{text}\n", file=stream, flush=True)
                    shown, shown_at = text, now
                if once:
                    return
                time.sleep(interval)
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
