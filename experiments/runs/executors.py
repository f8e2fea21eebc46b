"""Executors of runs: this process, processes of this host, jobs of Slurm.

submitit starts processes and jobs. Whether a run has succeeded is told by its mark alone.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from common.config.flags import check_fields, free_flag
from common.errors import UserError
from common.record.jsonl import write_atomically
from experiments.runs.stages import LOG, StageFailed, read_mark

JOBS = "jobs"  # in a study's folder: submitit's files
FAILED = "failed.txt"  # in a run's folder: why it is not finished
STOP_SIGNAL = "USR1"  # Slurm sends it before the time limit; a training script saves
SECONDS_TO_SAVE = 300  # from that signal to the time limit; at most a third of the time
PAUSE, SLURM_PAUSE = 0.5, 5.0  # seconds between two looks at what runs
GONE_AFTER = 15.0  # seconds that a job is in no queue: its mark may come late from another host
NO_LIMIT = 10**6  # minutes of a process on this host; times that a job is queued again


@dataclass
class EngineFlags:
    """How many runs at once, and where."""

    _engine: ClassVar = "many runs at once"
    parallel: int = free_flag(
        1, "runs at once on this host; each has its own GPUs, or its share of the cores", gt=0
    )
    executor: str = free_flag("local", "this host, or a job of Slurm a run", ["local", "slurm"])
    slurm_partition: str = free_flag("", "partition of the jobs (empty: the cluster's)")
    slurm_minutes: int = free_flag(60, "time limit; a run that has saved is queued again", gt=0)
    slurm_gpus: int = free_flag(-1, "GPUs of a run (-1: one for each of its processes)", ge=-1)
    slurm_options: list[str] = free_flag([], "other options of sbatch, as account=NAME mem=64G")

    def __post_init__(self) -> None:
        """Refuse values that no executor has."""
        check_fields(self)
        if self.executor == "slurm" and self.parallel > 1:
            raise UserError("--parallel is of this host; Slurm decides how many jobs run at once.")
        for option in self.slurm_options:
            if "=" not in option:
                raise UserError(f"--slurm_options has {option!r}; it must be NAME=VALUE.")

    @property
    def is_apart(self) -> bool:
        """Whether runs are made in other processes than this one."""
        return self.executor == "slurm" or self.parallel > 1


@dataclass(frozen=True)
class Task:
    """A run as an executor takes it."""

    folder: Path
    kind: str  # those of one kind take about as long
    make: Callable[[], None]  # also in another process; it raises an exception unless it is made
    made_by: Callable[[], Mapping[str, Any]]  # what its mark holds when it is finished
    needs: Sequence[Path] = ()  # the folders of the runs that it builds on
    num_processes: int = 1

    @property
    def is_finished(self) -> bool:
        """Whether this very run is finished in its folder."""
        return read_mark(self.folder) == self.made_by()


class Job(Protocol):
    """A run that an executor has started."""

    def state(self) -> str:
        """`queued`, `running` or `ended`, finished or not."""


def attempt(task: Task) -> None:
    """Make a run, or leave in its folder why it could not be made."""
    (task.folder / FAILED).unlink(missing_ok=True)
    try:
        task.make()
    except Exception as error:
        task.folder.mkdir(parents=True, exist_ok=True)
        kind = "refused" if isinstance(error, UserError) else "failed"
        write_atomically(task.folder / FAILED, [f"{kind}\n{error or type(error).__name__}"])


def failure_of(folder: Path) -> Exception:
    """Why a run that has ended is not finished."""
    file = folder / FAILED
    if not file.exists():
        return StageFailed(f"{folder} was ended; its last words are in {folder / LOG}.")
    kind, _, text = file.read_text(encoding="utf-8").partition("\n")
    return UserError(text) if kind == "refused" else StageFailed(text)


# ---- this process --------------------------------------------------------------------------------


class Here:
    """This process: a run shows its output, and has ended when it is started."""

    at_once, pause, is_apart, first_state = 1, 0.0, False, "running"

    def __enter__(self) -> None:
        """Nothing is to be started."""

    def __exit__(self, *_: object) -> None:
        """Nothing is left: a run takes its child along."""

    def start(self, task: Task) -> Job:
        """Make a run."""
        attempt(task)
        return self

    def state(self) -> str:
        """That of the last run."""
        return "ended"


# ---- other processes -----------------------------------------------------------------------------


@dataclass
class Apart:
    """A run in a process of its own: what submitit pickles and calls there."""

    task: Task
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment

    def __call__(self) -> None:
        """Make the run. Its output goes to its log alone."""
        os.environ.update(self.variables)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        self.before = self.saved()
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            attempt(self.task)

    def saved(self) -> set[Path]:
        """Checkpoints, and files of results and marks."""
        folder = self.task.folder
        return {*folder.rglob("step_*"), *folder.rglob("*.json")}

    def checkpoint(self) -> Any:
        """Wait until the run has saved: submitit calls this before the time limit, and requeues.

        Raises:
            StageFailed: nothing was saved since its start.
        """
        from submitit.helpers import DelayedSubmission

        with suppress(ChildProcessError):  # there is none between two scripts
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if self.saved() == self.before:
            limit = "the time limit came before anything was saved"
            raise StageFailed(f"{self.task.folder}: {limit}; give it more --slurm_minutes.")
        return DelayedSubmission(self)


def submitit() -> Any:
    """The package, told to save at the signal at which training scripts save.

    Raises:
        UserError: it is not installed.
    """
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = STOP_SIGNAL
    try:
        import submitit
    except ImportError:
        raise UserError("several runs at once need submitit: pip install submitit.") from None
    return submitit


class Processes:
    """Processes of this host."""

    pause, is_apart, first_state = PAUSE, True, "running"

    def __init__(self, at_once: int, folder: Path) -> None:
        """Take the number of runs at once, and the folder for submitit's files."""
        self.at_once = at_once
        self.executor = submitit().LocalExecutor(folder)
        self.executor.update_parameters(timeout_min=NO_LIMIT, stderr_to_stdout=True)
        self.jobs: dict[int, Process] = {}  # the last one of each slot

    def __enter__(self) -> None:
        """Nothing is to be started."""

    def __exit__(self, *_: object) -> None:
        """End what still runs, and wait until it has saved."""
        running = [job for job in self.jobs.values() if job.state() == "running"]
        if running:
            print(f"ending {len(running)} runs, when they have saved", flush=True)
        for job in running:
            os.kill(int(job.submitted.job_id), signal.SIGTERM)
        while any(job.state() == "running" for job in running):
            time.sleep(self.pause)

    def start(self, task: Task) -> Job:
        """Start a run in a process that Ctrl-C in the terminal does not reach."""
        taken = [slot for slot, job in self.jobs.items() if job.state() == "running"]
        slot = next(slot for slot in range(self.at_once) if slot not in taken)
        apart = Apart(task, share(slot, self.at_once, task.num_processes))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the process inherits
        try:
            self.jobs[slot] = Process(self.executor.submit(apart))
        finally:
            signal.signal(signal.SIGINT, before)
        return self.jobs[slot]


@dataclass
class Process:
    """A run in a process of this host."""

    submitted: Any  # submitit's job; its number is that of the process

    def state(self) -> str:
        """`running` or `ended`."""
        return "ended" if self.submitted.done() else "running"


def share(slot: int, at_once: int, num_processes: int) -> dict[str, str]:
    """The GPUs of a slot, in turn where there are fewer, and its threads unless they are given."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // at_once // num_processes)
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if every:
        mine = [every[(slot * num_processes + i) % len(every)] for i in range(num_processes)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(mine))
    return variables


# ---- Slurm ---------------------------------------------------------------------------------------


class Slurm:
    """Jobs of Slurm, one for each run, on one host each.

    A job is named by its run. So a run that has a job is not submitted a second time, whichever
    driver asked for the first. Submitted is all that is ready: Slurm decides how many run at once.
    """

    at_once, pause, is_apart, first_state = NO_LIMIT, SLURM_PAUSE, True, "queued"

    def __init__(self, engine: EngineFlags, folder: Path) -> None:
        """Take the options of the jobs, and the folder for submitit's files.

        Raises:
            UserError: there is no Slurm.
        """
        self.gpus, self.jobs = engine.slurm_gpus, list[SlurmJob]()
        try:
            self.executor = submitit().SlurmExecutor(folder, max_num_timeout=NO_LIMIT)
        except RuntimeError as error:
            raise UserError(f"--executor is slurm: {error}") from None
        options = dict(text.split("=", 1) for text in engine.slurm_options)
        self.executor.update_parameters(
            partition=engine.slurm_partition or None,
            time=engine.slurm_minutes,
            nodes=1,
            ntasks_per_node=1,
            signal_delay_s=min(SECONDS_TO_SAVE, 20 * engine.slurm_minutes),
            stderr_to_stdout=True,
            additional_parameters={"requeue": True, **options},
        )

    def __enter__(self) -> None:
        """Ask for the queue."""
        self.queue, self.asked = slurm_queue(), time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel what is in the queue, if this driver was asked to end; cancelled runs save."""
        is_asked = kind is not None and not issubclass(kind, Exception)
        left = [self.queue[job.name][0] for job in self.jobs if job.name in self.queue]
        if is_asked and left:
            subprocess.run(["scancel", *left], check=False)

    def start(self, task: Task) -> Job:
        """Submit a run, unless its job is in the queue.

        Raises:
            UserError: sbatch refuses it.
        """
        name = job_name(task)
        if name not in self.queue:
            gpus = task.num_processes if self.gpus < 0 else self.gpus
            self.executor.update_parameters(job_name=name, gpus_per_node=gpus)
            try:
                job = self.executor.submit(Apart(task))
            except submitit().core.utils.FailedJobError as error:
                raise UserError(f"Slurm refuses the job of {task.folder}: {error}") from None
            self.queue[name] = (job.job_id, "PENDING")
        self.jobs.append(SlurmJob(self, task, name))
        return self.jobs[-1]

    def look(self) -> None:
        """Ask for the queue, unless it was asked for just now."""
        if time.monotonic() - self.asked > self.pause / 2:
            self.queue, self.asked = slurm_queue(), time.monotonic()


@dataclass
class SlurmJob:
    """A run in a job."""

    slurm: Slurm
    task: Task
    name: str
    last_seen: float = field(default_factory=time.monotonic)

    def state(self) -> str:
        """`queued`, also again, `running` or `ended`."""
        self.slurm.look()
        if self.name in self.slurm.queue:
            self.last_seen = time.monotonic()
            return "queued" if self.slurm.queue[self.name][1] == "PENDING" else "running"
        is_gone = time.monotonic() - self.last_seen > GONE_AFTER or self.task.is_finished
        return "ended" if is_gone else "running"


def job_name(task: Task) -> str:
    """A name that no job of another run has, or of this one after a change."""
    made_by = json.dumps([str(task.folder.absolute()), task.made_by()], sort_keys=True)
    digest = hashlib.sha256(made_by.encode()).hexdigest()
    return re.sub(r"\W", "_", task.folder.name) + f"-{digest[:16]}"


def slurm_queue() -> dict[str, tuple[str, str]]:
    """The user's jobs that wait or run: number and state by name.

    By squeue, since sacct works on clusters alone that have a data base.

    Raises:
        UserError: Slurm does not answer.
    """
    command = ["squeue", "--me", "--noheader", "--format=%i %T %j"]
    for seconds in (1, 10, 60, 0):  # its controller may be started again
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if not asked.returncode:
            lines = (line.split(" ", 2) for line in asked.stdout.splitlines())
            return {name: (number, state) for number, state, name in lines}
        time.sleep(seconds)
    raise UserError(f"Slurm does not answer: {asked.stderr.strip()}")


def executor_of(engine: EngineFlags, study_dir: Path) -> Here | Processes | Slurm:
    """The executor that the flags ask for."""
    if engine.executor == "slurm":
        return Slurm(engine, study_dir / JOBS)
    return Processes(engine.parallel, study_dir / JOBS) if engine.is_apart else Here()
