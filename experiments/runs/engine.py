"""Many runs: each starts when those that it builds on are finished, in turn, at once or by Slurm.

`graphlib` says which runs are ready. They are made in this process, one after another; with
`--parallel 4` in as many processes of this host, each with its own GPUs or share of the cores; with
`--executor slurm` in jobs (`executors.py`, `slurm.py`).

The mark in its folder says whether a run is finished (`stages.py`), and Slurm says which jobs are
in its queue. So a driver that was killed is started again by the same command: it waits for the
processes and the jobs that it had left, and starts none twice.
"""

import os
import time
from collections.abc import Sequence
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path

from common.errors import UserError
from experiments.runs import stages
from experiments.runs.executors import (
    FAILED,
    JOBS,
    EngineFlags,
    Here,
    Job,
    Processes,
    Task,
    failure_of,
)
from experiments.runs.progress import Screen
from experiments.runs.slurm import Slurm
from experiments.runs.stages import Stage, StageFailed


def run_stages(runs: Sequence[Stage], engine: EngineFlags, study_dir: Path) -> None:
    """Make runs of scripts as `run_all` does.

    A run builds on each other in whose folder one of its flags names something.
    """
    tasks = []
    for stage in runs:
        named = [absolute(text) for text in stages.flag_texts(stage)]
        others = [run.output_dir for run in runs if run is not stage]
        task = Task(
            folder=stage.output_dir,
            kind=stage.script,
            make=partial(stages.run, stage),
            made_by=partial(stages.description, stage),
            needs=[o for o in others if any(name.startswith(absolute(str(o))) for name in named)],
            num_processes=stage.num_processes,
        )
        tasks.append(task)
    run_all(tasks, engine, study_dir)


def absolute(path: str) -> str:
    """A path that begins with that of each folder it is in."""
    return os.path.abspath(os.path.expanduser(path)) + os.sep


def run_all(tasks: Sequence[Task], engine: EngineFlags, study_dir: Path) -> None:
    """Make every run that is not finished, each after those that it builds on.

    A run that fails holds back those that build on it, and no others.

    Args:
        tasks: what to run, in the order in which it starts where it can.
        engine: how many at once, and where.
        study_dir: folder of the study, for the executor's files.

    Raises:
        UserError: each run that failed refuses a value, or the executor cannot be used.
        StageFailed: a run failed, when all that could be made is made.
    """
    width = max((task.num_processes for task in tasks), default=1)
    executor = executor_of(engine, study_dir, width)
    screen = Screen({task.folder: task.kind for task in tasks}, is_apart=engine.is_apart)
    study = Study(tasks, executor, screen)
    with executor, screen.shown():
        while study.start_next() or study.jobs:
            study.look()
    if study.failures:
        raise study.failure()


def executor_of(engine: EngineFlags, study_dir: Path, width: int) -> Here | Processes | Slurm:
    """The executor that the flags ask for; no run has more processes than `width`."""
    if engine.executor == "slurm":
        return Slurm(engine, study_dir)
    return Processes(engine.parallel, width, study_dir / JOBS) if engine.is_apart else Here()


class Study:
    """Runs that wait for others, run, or have failed."""

    def __init__(
        self, tasks: Sequence[Task], executor: Here | Processes | Slurm, screen: Screen
    ) -> None:
        """Take the runs, what makes them and what shows them."""
        self.tasks = {task.folder: task for task in tasks}
        self.executor, self.screen = executor, screen
        self.order = TopologicalSorter({task.folder: task.needs for task in tasks})
        self.order.prepare()
        self.ready: list[Path] = []
        self.jobs: dict[Path, Job] = {}
        self.failures: dict[Path, Exception] = {}

    def start_next(self) -> bool:
        """Start the first run that can start, if there is one and room for it."""
        places = list(self.tasks)
        self.ready = sorted([*self.ready, *self.order.get_ready()], key=places.index)
        if not self.ready or len(self.jobs) >= self.executor.at_once:
            return False
        folder = self.ready.pop(0)
        if self.tasks[folder].is_finished:
            self.screen.note(folder, "finished before")
            self.order.done(folder)
        else:
            (folder / FAILED).unlink(missing_ok=True)
            self.screen.note(folder, self.executor.first_state)
            self.jobs[folder] = self.executor.start(self.tasks[folder])
        return True

    def look(self) -> None:
        """Take the states of the runs, after a pause where none can be started."""
        if self.jobs and (not self.ready or len(self.jobs) >= self.executor.at_once):
            time.sleep(self.executor.pause)
        for folder, job in list(self.jobs.items()):
            if (state := job.state()) != "ended":
                self.screen.note(folder, state)
                continue
            del self.jobs[folder]
            if self.tasks[folder].is_finished:
                self.screen.note(folder, "finished")
                self.order.done(folder)
            else:
                self.screen.note(folder, "failed")
                self.failures[folder] = failure_of(folder, job.log)

    def failure(self) -> Exception:
        """All failures as one, and what was not made: a refusal if all are."""
        refused = all(isinstance(error, UserError) for error in self.failures.values())
        texts = list(map(str, self.failures.values()))
        if held_back := self.screen.those("waiting"):
            texts.append(f"Not made, since they build on it: {', '.join(map(str, held_back))}.")
        return UserError(" ".join(texts)) if refused else StageFailed("\n".join(texts))
