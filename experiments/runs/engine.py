"""Many runs: each starts when those that it builds on are finished, in turn, at once or by Slurm.

`graphlib` says which runs are ready. They are made in this process, one after another; with
`--parallel 4` in as many processes of this host, each with its own GPUs or share of the cores; with
`--executor slurm` in jobs (`executors.py`, `slurm.py`).

The mark in its folder says whether a run is finished (`stages.py`), and Slurm says which jobs are
in its queue. So a driver that was killed is started again by the same command: it waits for the
processes and the jobs that it had left, and starts none twice.
"""

import os
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from common.errors import UserError
from common.record.run_folder import read_metrics
from experiments.runs.executors import FAILED, JOBS, EngineFlags, Here, Processes, failure_of
from experiments.runs.slurm import Slurm
from experiments.runs.stages import Stage, StageFailed, command, flag_texts, is_finished

ACTIVE = ("running", "queued")


def run_stages(runs: Sequence[Stage], engine: EngineFlags, study_dir: Path) -> None:
    """Make every run that is not finished, each after those that it builds on.

    A run builds on each other in whose folder one of its flags names something. One that fails
    holds back those that build on it, and no others. The study's folder has the executor's files.

    Raises:
        UserError: each run that failed refuses a value, or the executor cannot be used.
        StageFailed: a run failed, when all that could be made is made.
    """
    study = Study(runs, executor_of(runs, engine, study_dir))
    with study.executor, study.screen():
        while study.start_next() or study.active():
            study.look()
    if study.failures:
        raise study.failure()


def print_runs(runs: Sequence[Stage]) -> None:
    """Print every run in the order in which they are made: its folder, its state, its command."""
    order = TopologicalSorter({run.output_dir: needs(run, runs) for run in runs})
    order.prepare()
    by_folder = {run.output_dir: run for run in runs}
    ready: list[Path] = []
    finished: set[Path] = set()
    while order.is_active():
        ready = sorted([*ready, *order.get_ready()], key=list(by_folder).index)
        folder = ready.pop(0)
        order.done(folder)
        run = by_folder[folder]
        # One that builds on a run that is made again is made again too
        if finished.issuperset(needs(run, runs)) and is_finished(run):
            finished.add(folder)
        print(f"# {folder}: {'finished' if folder in finished else 'to be made'}")
        print(shlex.join(command(run)), flush=True)
    print(f"# {len(finished)} of {len(by_folder)} runs are finished", flush=True)


def executor_of(
    runs: Sequence[Stage], engine: EngineFlags, study_dir: Path
) -> Here | Processes | Slurm:
    """The executor that the flags ask for."""
    if engine.executor == "slurm":
        return Slurm(engine, study_dir)
    if engine.parallel < 2:
        return Here()
    width = max((run.num_processes for run in runs), default=1)
    return Processes(engine.parallel, width, study_dir / JOBS)


def needs(run: Stage, runs: Sequence[Stage]) -> list[Path]:
    """The folders of the runs that a run builds on."""
    named = [absolute(text) for text in flag_texts(run)]
    folders = [other.output_dir for other in runs if other is not run]
    return [f for f in folders if any(name.startswith(absolute(str(f))) for name in named)]


def absolute(path: str) -> str:
    """A path that begins with that of each folder it is in."""
    return os.path.abspath(os.path.expanduser(path)) + os.sep


class Study:
    """Runs by their folders: what waits, runs, is finished or has failed."""

    def __init__(self, runs: Sequence[Stage], executor: Here | Processes | Slurm) -> None:
        """Take the runs, in the order in which they start where they can."""
        self.runs, self.executor = {run.output_dir: run for run in runs}, executor
        self.order = TopologicalSorter({run.output_dir: needs(run, runs) for run in runs})
        self.order.prepare()
        self.ready: list[Path] = []
        self.states = dict.fromkeys(self.runs, "waiting")
        self.failures: list[Exception] = []
        self.begun = time.monotonic()
        self.started: dict[Path, float] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)  # of finished runs, by script
        # In a terminal in which no run prints
        self.is_live = sys.stdout.isatty() and not isinstance(executor, Here)

    def screen(self) -> AbstractContextManager[Any]:
        """The table, drawn every second; without it each change is a line."""
        from rich.live import Live

        return (
            Live(get_renderable=self.table, refresh_per_second=1) if self.is_live else nullcontext()
        )

    def table(self) -> Any:
        """Counts and times, and the runs that have failed or are running."""
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, show_header=False)
        for shown in ("failed", "running"):
            for folder in (f for f, state in self.states.items() if state == shown):
                steps = [line["step"] for line in read_metrics(folder) if "step" in line]
                table.add_row(str(folder), shown, f"step {steps[-1]}" if steps else "")
        return Group(self.line(), table)

    def active(self) -> list[Path]:
        """The runs that the executor has."""
        return [folder for folder, state in self.states.items() if state in ACTIVE]

    def start_next(self) -> bool:
        """Start the first run that can start, if there is one and room for it."""
        self.ready = sorted([*self.ready, *self.order.get_ready()], key=list(self.runs).index)
        if not self.ready or len(self.active()) >= self.executor.at_once:
            return False
        folder = self.ready.pop(0)
        if is_finished(self.runs[folder]):
            self.note(folder, "finished before")
            self.order.done(folder)
        else:
            (folder / FAILED).unlink(missing_ok=True)
            self.note(folder, self.executor.first_state)
            self.executor.start(self.runs[folder])
        return True

    def look(self) -> None:
        """Take the states of the runs, after a pause where none can be started."""
        active = self.active()
        if active and (not self.ready or len(active) >= self.executor.at_once):
            time.sleep(self.executor.pause)
        for folder in active:
            run = self.runs[folder]
            if (state := self.executor.state(run)) != "ended":
                self.note(folder, state)
            elif is_finished(run):
                self.note(folder, "finished")
                self.order.done(folder)
            else:
                self.note(folder, "failed")
                self.failures.append(failure_of(run, self.executor.log(run)))

    def failure(self) -> Exception:
        """All failures as one, and what was not made: a refusal if all are."""
        refused = all(isinstance(error, UserError) for error in self.failures)
        texts = list(map(str, self.failures))
        if held_back := [str(f) for f, state in self.states.items() if state == "waiting"]:
            texts.append(f"Not made, since they build on it: {', '.join(held_back)}.")
        return UserError(" ".join(texts)) if refused else StageFailed("\n".join(texts))

    def note(self, folder: Path, state: str) -> None:
        """Take a run's state, and print a new one with the counts, where no screen has them."""
        if state == self.states[folder]:
            return
        self.states[folder] = state
        if state == "running":
            self.started.setdefault(folder, time.monotonic())
        elif state == "finished" and folder in self.started:  # else it was too quick to be seen
            seconds = time.monotonic() - self.started[folder]
            self.seconds[self.runs[folder].script].append(seconds)
        if not self.is_live:
            print(f"{folder}: {state} ({self.line()})", flush=True)

    def line(self) -> str:
        """Counts and times. A run takes as long as those of its script, or as all, on average."""
        counts, now = Counter(self.states.values()), time.monotonic()
        num_finished = counts["finished"] + counts["finished before"]
        texts = [f"{num_finished} of {len(self.states)} finished"]
        texts += [f"{counts[s]} {s}" for s in (*ACTIVE, "waiting", "failed") if counts[s]]
        texts.append(f"{(now - self.begun) / 60:.0f} min so far")
        if every := list(chain.from_iterable(self.seconds.values())):
            left = 0.0
            for folder, state in self.states.items():
                if state in (*ACTIVE, "waiting"):
                    whole = mean(self.seconds.get(self.runs[folder].script, every))
                    left += max(0.0, whole - (now - self.started.get(folder, now)))
            texts.append(f"about {left / max(1, counts['running']) / 60:.0f} min left")
        return ", ".join(texts)
