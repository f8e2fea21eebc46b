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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX
from common.record.progress import Run, find_runs, seconds_per_step, total_steps
from common.record.terminal import NOT_MEASURED, format_cell, format_number, wrapped_table

BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
DONE, LEFT = "━", "─"
LOG_SECONDS = 30.0  # between two pictures off a terminal
NUM_SAMPLES = 4
# What is shown, in this order, as far as it was logged and the window is high enough.
SHOWN = (
    *("loss", "eval_loss", "accuracy", "eval_accuracy", "reward_margin"),
    *("reward", FUNCTION_PREFIX, "kl", "completion_length", "stop_rate", "entropy"),
    *("chosen_logp", "rejected_logp", "grad_norm", "learning_rate", "tokens_per_second"),
    *("step_seconds", "peak_memory_gb", LOGGED_PREFIX),
)


def duration(seconds: float) -> str:
    """A time that people read: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def headline(run: Run, width: int, now: float, plain: bool) -> str:
    """Name, a bar, steps, speed, time left, and when the last line came."""
    if not run.metrics.records:
        what = "no line yet" if run.config else "not started"
        if (run.folder / "results.json").is_file():
            what = "evaluated: see its report.html"
        return f"{run.name}  {what}"[:width]
    total, pace = total_steps(run), seconds_per_step(run.metrics.records)
    parts = [f"step {run.step:,}" + (f" of {total:,}" if total else "")]
    if pace is not None:
        parts.append(f"{format_number(pace)} s per step")
    minutes = run.metrics.records[-1].get("elapsed_minutes")
    if minutes is not None:
        parts.append(f"{duration(60 * minutes)} so far")
    if total and run.step >= total:
        parts.append("all steps made")
    else:
        if total and pace is not None:
            parts.append(f"{duration(pace * (total - run.step))} left")
        parts.append(f"last line {duration(max(0.0, now - run.metrics.changed))} ago")
    text = ", ".join(parts)
    room = min(30, width - len(run.name) - len(text) - 4)
    if total and room >= 8:
        done = round(room * min(1, run.step / total))
        bar = ("#" * done + "." * (room - done)) if plain else DONE * done + LEFT * (room - done)
        text = f"{bar}  {text}"
    return f"{run.name}  {text}"[:width]


# --- curves ---


def metric_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was logged of `SHOWN`, in that order; a prefix stands for all names behind it."""
    present = sorted({name for record in records for name in record})
    prefixes = (FUNCTION_PREFIX, LOGGED_PREFIX)
    return [
        name
        for wanted in SHOWN
        for name in present
        if name == wanted or (wanted in prefixes and name.startswith(wanted))
    ]


def sparkline(
    steps: Sequence[int], values: Sequence[float], width: int, blocks: str = BLOCKS
) -> str:
    """Values as a row of blocks from the lowest to the highest, over the steps from 0 to the last.

    A column is the mean of its steps, or as high as the one before where it has none. NaN is a gap;
    values that are all equal are a line in the middle.
    """
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(steps, values, strict=True):
        columns[min(width - 1, step * width // max(1, steps[-1]))].append(value)
    heights: list[float] = []
    for column in columns:
        heights.append(_mean(column) if column else heights[-1] if heights else math.nan)
    known = [value for value in heights if not math.isnan(value)]
    low, extent = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(blocks) - 1
    return "".join(
        " " if math.isnan(m) else blocks[round(top * (m - low) / extent) if extent else top // 2]
        for m in heights
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def curve_lines(run: Run, width: int, most: int, plain: bool) -> list[str]:
    """A line for each metric: name, sparkline, last value, lowest and highest."""
    records, names = run.metrics.records, metric_names(run.metrics.records)[: max(0, most)]
    if not names:
        return []
    shown = {name: format_cell(name) for name in names}  # those of reward functions hold anything
    label = min(max(map(len, shown.values())), max(8, width // 3))
    room = width - label - 42 if width >= 80 else width - label - 14
    room = max(6, room)
    lines = []
    for name in names:
        steps = [record["step"] for record in records if name in record]
        values = [_number(record[name]) for record in records if name in record]
        known = [value for value in values if not math.isnan(value)]
        last = NOT_MEASURED if math.isnan(values[-1]) else format_number(values[-1])
        curve = sparkline(steps, values, room, PLAIN_BLOCKS if plain else BLOCKS)
        line = f"  {shown[name][:label]:<{label}}  {curve} {last:>9}"
        if width >= 80 and known:
            line += f"  from {format_number(min(known))} to {format_number(max(known))}"
        lines.append(line[:width].rstrip())
    return lines


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def sample_lines(run: Run, width: int, most: int) -> list[str]:
    """The last table of samples, as many rows as there is room for."""
    records = run.samples.records
    if not records or most < 5:
        return []
    step = records[-1]["step"]
    hidden = ("step",)
    rows = [
        {k: v for k, v in row.items() if k not in hidden and not isinstance(v, list | dict)}
        for row in records
        if row["step"] == step
    ]
    distinct = list({row.get("prompt"): row for row in reversed(rows)}.values())[::-1]
    shown = (distinct if len(distinct) > 1 else rows)[:NUM_SAMPLES]
    lines = wrapped_table(shown, width - 2, max_lines=3).splitlines()
    return ["", f"  samples at step {step:,}", *(f"  {line}"[:width] for line in lines)][:most]


# --- the picture ---


def picture(runs: Sequence[Run], width: int, height: int, now: float, plain: bool) -> str:
    """A line for every run, and everything about the one that wrote last."""
    current = max(runs, key=lambda run: (run.metrics.changed, run.samples.changed))
    before = [headline(run, width, now, plain) for run in runs if run is not current]
    lines = [*before[: max(0, height - 20)], headline(current, width, now, plain)]
    for_samples = min(3 + 4 * NUM_SAMPLES, height // 2) if current.samples.records else 0
    lines += curve_lines(current, width, height - len(lines) - for_samples, plain)
    lines += sample_lines(current, width, height - len(lines) - 1)
    return "\n".join(lines)


@contextmanager
def own_screen(stream: TextIO, interactive: bool) -> Iterator[None]:
    """A screen of its own, so that what stood in the terminal is there again afterwards."""
    try:
        if interactive:
            stream.write("\x1b[?1049h\x1b[?25l")
        yield
    finally:
        if interactive:
            stream.write("\x1b[?25h\x1b[?1049l")
            stream.flush()


def watch(places: Sequence[Path], interval: float, once: bool, stream: TextIO) -> None:
    """Show the runs until Ctrl-C, or once; the last picture stays in the terminal."""
    interactive = stream.isatty() and not once
    encoding = stream.encoding or "ascii"
    plain = "utf" not in encoding.lower()
    runs: dict[Path, Run] = {}
    text, shown, shown_at = "", "", -math.inf
    try:
        with own_screen(stream, interactive):
            while True:
                places_now = find_runs(places)
                present = [runs.setdefault(f, Run.at(f, name)) for f, name in places_now]
                for run in present:
                    run.read()
                now, size = time.time(), shutil.get_terminal_size((100, 40))
                text = picture(present, size.columns - 1, size.lines - 1, now, plain)
                text = text.encode(encoding, "replace").decode(encoding)
                if interactive:
                    lines = "".join(f"{line}\x1b[K\n" for line in text.split("\n"))
                    stream.write(f"\x1b[H{lines}\x1b[J")
                elif once or (text != shown and now - shown_at >= LOG_SECONDS):
                    stream.write(f"{text}\n" if once else f"{text}\n\n")
                    shown, shown_at = text, now
                stream.flush()
                if once:
                    return
                time.sleep(interval)
    finally:
        stream.write(f"{text}\n" if interactive else "")


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
