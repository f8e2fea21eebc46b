"""Many runs: each starts when those that it builds on are finished, in turn, at once or by Slurm.

`graphlib` says which runs are ready. They are made in this process, one after another; with
`--parallel 4` in as many processes of this host, each with its own GPUs or share of the cores; with
`--executor slurm` in jobs (`executors.py`).

Whether a run is finished is told by the mark in its folder (`stages.py`), and which jobs are in
Slurm's queue by Slurm. So a driver that was killed is started again by the same command: it waits
for the processes and the jobs that it had left, and starts none twice.
"""

import os
import time
from collections.abc import Sequence
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path

from common.errors import UserError
from experiments.runs import stages
from experiments.runs.executors import EngineFlags, Job, Task, executor_of, failure_of
from experiments.runs.progress import Screen
from experiments.runs.stages import Stage, StageFailed


def run_stages(runs: Sequence[Stage], engine: EngineFlags, study_dir: Path) -> None:
    """Make runs of scripts as `run_all` does.

    A run builds on each other in whose folder one of its flags names something.
    """
    tasks = []
    for stage in runs:
        named = [os.path.abspath(text) + os.sep for text in stages.flag_texts(stage)]
        others = [run.output_dir for run in runs if run is not stage]
        needs = [o for o in others if any(n.startswith(os.path.abspath(o) + os.sep) for n in named)]
        make, made_by = partial(stages.run, stage), partial(stages.description, stage)
        about = (stage.output_dir, stage.script, make, made_by)
        tasks.append(Task(*about, needs, stage.num_processes))
    run_all(tasks, engine, study_dir)


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
    by_folder = {task.folder: task for task in tasks}
    order = TopologicalSorter({task.folder: task.needs for task in tasks})
    order.prepare()
    ready: list[Path] = []
    jobs: dict[Path, Job] = {}
    failures: dict[Path, Exception] = {}
    executor = executor_of(engine, study_dir)
    screen = Screen({task.folder: task.kind for task in tasks}, is_apart=executor.is_apart)
    with executor, screen.shown():
        while order.is_active():
            ready = sorted([*ready, *order.get_ready()], key=list(by_folder).index)
            if ready and by_folder[ready[0]].is_finished:
                screen.note(ready[0], "finished before")
                order.done(ready.pop(0))
            elif ready and len(jobs) < executor.at_once:
                folder = ready.pop(0)
                screen.note(folder, executor.first_state)
                jobs[folder] = executor.start(by_folder[folder])
            elif jobs:
                time.sleep(executor.pause)
            else:
                break  # the others build on what has failed
            for folder, state in [(folder, job.state()) for folder, job in jobs.items()]:
                if state == "ended":
                    del jobs[folder]
                    state = "finished" if by_folder[folder].is_finished else "failed"
                screen.note(folder, state)
                if state == "finished":
                    order.done(folder)
                elif state == "failed":
                    failures[folder] = failure_of(folder)
    if failures:
        raise all_of(list(failures.values()), screen.number_of("waiting"))


def all_of(failures: Sequence[Exception], held_back: int) -> Exception:
    """One error of all failures: a refusal if all are."""
    text = "\n".join(map(str, failures))
    if held_back:
        text += f"\nNot made, since they build on what failed: {held_back} runs."
    refused = all(isinstance(error, UserError) for error in failures)
    return UserError(text) if refused else StageFailed(text)
