"""Two executors of runs: this process, and processes of this host.

submitit starts processes; `slurm.py` has a third executor, of jobs. The mark of a run alone says
whether it has succeeded.
"""

import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from common.config.flags import check_fields, flag, free_flag
from common.errors import UserError
from common.record.jsonl import write_atomically
from common.record.run_folder import MARK
from experiments.runs import stages
from experiments.runs.stages import LOG, Stage, StageFailed, exit_by

JOBS = "jobs"  # in a study's folder: submitit's files
FAILED = "failed.json"  # in a run's folder: why it is not finished
STOP_SIGNAL = signal.SIGUSR1  # Slurm is asked to send it before the time limit
PAUSE = 0.5  # seconds between two looks at what runs
NO_LIMIT = 10**6  # minutes of a process on this host; jobs in Slurm's queue


@dataclass
class EngineFlags:
    """The number of runs at once, and their place."""

    _engine: ClassVar = "many runs at once"
    dry_run: bool = free_flag(False, "check all flags, print the runs with commands, and end")
    parallel: int = free_flag(0, "runs at once (0: on this host one, by Slurm all that are ready)")
    executor: str = free_flag("local", "this host, or a job of Slurm a run", ["local", "slurm"])
    slurm_partition: str = free_flag("", "partition of the jobs (empty: the cluster's)")
    slurm_minutes: int = free_flag(60, "time limit; a run that has saved is queued again", gt=0)
    slurm_gpus: int = free_flag(-1, "GPUs of a run (-1: one for each of its processes)", ge=-1)
    slurm_options: list[str] = free_flag([], "other options of sbatch, as account=NAME mem=64G")

    def __post_init__(self) -> None:
        """Refuse values that no executor has."""
        check_fields(self)
        for option in self.slurm_options:
            if "=" not in option:
                raise UserError(f"--slurm_options has {option!r}; it must be NAME=VALUE.")


@dataclass
class StudyFlags(EngineFlags):
    """A chain of runs for each of several seeds."""

    _chains: ClassVar = "chains"
    seeds: list[int] = flag([0, 1, 2], "one chain for each", required=True, ge=0)
    num_processes: int = flag(1, "processes of a run on its host, by torchrun if several", gt=0)

    def __post_init__(self) -> None:
        """Refuse a seed that is there twice."""
        super().__post_init__()
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"--seeds is {self.seeds}; it must be one or more distinct numbers.")


def attempt(run: Stage) -> None:
    """Make a run, or leave in its folder why it could not be made."""
    (run.output_dir / FAILED).unlink(missing_ok=True)
    try:
        stages.run(run)
    except (UserError, StageFailed) as error:
        leave_failure(run, str(error), is_refused=isinstance(error, UserError))
    except Exception:
        leave_failure(run, traceback.format_exc())


def leave_failure(run: Stage, text: str, *, is_refused: bool = False) -> None:
    """Write why a run is not finished."""
    record = json.dumps({"is_refused": is_refused, "text": text})
    write_atomically(run.output_dir / FAILED, [record])


def failure_of(run: Stage, log: Path) -> Exception:
    """Why a run that has ended is not finished; the log of its job is named if nothing says it."""
    folder = run.output_dir
    if not (folder / FAILED).exists():
        return StageFailed(f"{folder} was ended; its last words are in {log} or {folder / LOG}.")
    failure = json.loads((folder / FAILED).read_text(encoding="utf-8"))
    return (UserError if failure["is_refused"] else StageFailed)(failure["text"])


# An executor starts runs, says which are `queued`, `running` or `ended`, finished or not, and has
# the output of a run's process outside of the run.


class Here(nullcontext[None]):
    """This process: a run shows its output, has ended when it is started, and leaves no child."""

    at_once, pause, first_state = 1, 0.0, "running"

    def start(self, run: Stage) -> None:
        """Make a run."""
        attempt(run)

    def state(self, run: Stage) -> str:
        """No run goes on after its start."""
        return "ended"

    def log(self, run: Stage) -> Path:
        """The log in its folder."""
        return run.output_dir / LOG


# ---- other processes -----------------------------------------------------------------------------


class TimeLimit(BaseException):
    """Slurm has warned of the time limit; passes through what handles errors."""


@dataclass
class Apart:
    """A run in another process: submitit pickles this, and calls it there."""

    stage: Stage
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment

    def __call__(self) -> None:
        """Make the run, whose output goes to its log alone; before a time limit save and requeue.

        The signal may reach this process alone, or its children too; it raises an exception, at
        which the run's script is asked to save and end (`stages.show`).
        """
        os.environ.update(self.variables)
        signal.signal(signal.SIGTERM, exit_by)
        signal.signal(STOP_SIGNAL, self.stop)
        before = self.saved()
        try:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
                attempt(self.stage)
        except TimeLimit:
            if self.saved() == before:
                text = f"{self.stage.output_dir}: the time limit came before anything was saved; "
                leave_failure(self.stage, f"{text}give it more --slurm_minutes.")
            else:
                subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)

    def stop(self, *_: object) -> None:
        """End the run; a second warning changes nothing."""
        signal.signal(STOP_SIGNAL, signal.SIG_IGN)
        raise TimeLimit

    def saved(self) -> set[Path]:
        """The files that a run goes on from when it is started again."""
        names, folder = ("checkpoints/step_*", MARK), self.stage.output_dir
        return {path for name in names for path in folder.rglob(name)}


def import_submitit() -> Any:
    """Import the package, which asks Slurm for `STOP_SIGNAL` before a time limit."""
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = STOP_SIGNAL.name.removeprefix("SIG")
    try:
        import submitit
    except ImportError:
        raise UserError("several runs at once need submitit: pip install submitit.") from None
    return submitit


class Processes:
    """Processes of this host."""

    pause, first_state = PAUSE, "running"

    def __init__(self, at_once: int, width: int, folder: Path) -> None:
        """Take the runs at once, the most processes of one, and a folder for submitit's files."""
        self.at_once, self.width = at_once, width
        self.executor = import_submitit().LocalExecutor(folder)
        self.executor.update_parameters(timeout_min=NO_LIMIT, stderr_to_stdout=True)
        self.jobs: dict[Path, Any] = {}  # submitit's, whose numbers are those of the processes
        self.slots: dict[int, Any] = {}  # the last one of each slot

    def __enter__(self) -> None:
        """Nothing is to be started."""

    def __exit__(self, *_: object) -> None:
        """End what still runs, and wait until it has saved."""
        running = [job for job in self.jobs.values() if not job.done()]
        if running:
            print(f"ending {len(running)} runs, when they have saved", flush=True)
        for job in running:
            os.kill(int(job.job_id), signal.SIGTERM)
        while not all(job.done() for job in running):
            time.sleep(self.pause)

    def start(self, run: Stage) -> None:
        """Start a run in a process that this one ends, and not Ctrl-C in the terminal."""
        taken = [slot for slot, job in self.slots.items() if not job.done()]
        slot = next(slot for slot in range(self.at_once) if slot not in taken)
        variables = share(slot * self.width, run.num_processes, self.at_once)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the process inherits
        try:
            job = self.executor.submit(Apart(run, variables))
        finally:
            signal.signal(signal.SIGINT, before)
        self.jobs[run.output_dir] = self.slots[slot] = job

    def state(self, run: Stage) -> str:
        """`running` or `ended`."""
        return "ended" if self.jobs[run.output_dir].done() else "running"

    def log(self, run: Stage) -> Path:
        """The output of submitit and Python."""
        return Path(self.jobs[run.output_dir].paths.stdout)


def share(first_gpu: int, num_processes: int, at_once: int) -> dict[str, str]:
    """Variables of a run: its GPUs, in turn where there are fewer, and threads unless given."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // at_once // num_processes)
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if gpus:
        chosen = [gpus[(first_gpu + i) % len(gpus)] for i in range(num_processes)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(chosen))
    return variables
