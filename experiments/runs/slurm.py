"""The executor of runs that makes them jobs of Slurm, by submitit."""

import hashlib
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError
from experiments.runs.executors import FAILED, JOBS, NO_LIMIT, Apart, EngineFlags, import_submitit
from experiments.runs.stages import Stage, description, is_finished

PAUSE = 5.0  # seconds between two looks at the queue
# Seconds after which Slurm is asked again: its controller may be started anew, or be busy
RETRIES = (1, 10, 60, 0)
SECONDS_TO_SAVE = 300  # from the signal to the time limit; at most a third of the time
GONE_AFTER = 60.0  # seconds that a job is in no queue: what it wrote may come late from its host


class Slurm:
    """Jobs of Slurm, one for each run, on one host each.

    A job is named by its run. So a run that has a job is not submitted a second time, whichever
    driver asked for the first.
    """

    pause, first_state = PAUSE, "queued"

    def __init__(self, engine: EngineFlags, study_dir: Path) -> None:
        """Take the options of the jobs, and the study's folder."""
        self.study_dir, self.gpus, self.jobs = study_dir, engine.slurm_gpus, dict[Path, Job]()
        self.at_once = engine.parallel or NO_LIMIT
        try:
            self.executor = import_submitit().SlurmExecutor(study_dir / JOBS)
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
            additional_parameters={"requeue": True}
            | {name.replace("-", "_"): value for name, value in options.items()},
        )

    def __enter__(self) -> None:
        """Ask for the queue."""
        self.queue, self.asked = slurm_queue(), time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel what is in the queue, if this driver was asked to end; cancelled runs save."""
        is_asked = kind is not None and not issubclass(kind, Exception)
        names = [job.name for job in self.jobs.values()]
        left = [self.queue[name][0] for name in names if name in self.queue]
        if is_asked and left:
            print(f"cancelling {len(left)} jobs", flush=True)
            subprocess.run(["scancel", *left], check=False)

    def start(self, run: Stage) -> None:
        """Submit a run, unless its job is in the queue; one that was cancelled ends first."""
        name = job_name(run, self.study_dir)
        while self.queue.get(name, ("", ""))[1] == "COMPLETING":
            time.sleep(self.pause)
            self.look()
        if name not in self.queue:
            gpus = run.num_processes if self.gpus < 0 else self.gpus
            self.executor.update_parameters(job_name=name, gpus_per_node=gpus)
            variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE)}
            self.queue[name] = (self.submit(Apart(run, variables)), "PENDING")
        self.jobs[run.output_dir] = Job(name, self.queue[name][0])

    def submit(self, apart: Apart) -> str:
        """Submit a job, not as a step of the job in which this driver may run; its number.

        Where sbatch has taken others it is asked again before it counts as a refusal.
        """
        package = import_submitit()
        kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
        for seconds in RETRIES if self.jobs else (0,):
            try:
                with package.helpers.clean_env():
                    os.environ.update(kept)
                    return str(self.executor.submit(apart).job_id)
            except package.core.utils.FailedJobError as error:
                refusal = str(error)
            time.sleep(seconds)
        raise UserError(f"Slurm refuses the job of {apart.stage.output_dir}: {refusal}")

    def state(self, run: Stage) -> str:
        """`queued`, also again, `running` or `ended`."""
        self.look()
        job = self.jobs[run.output_dir]
        if job.name in self.queue:
            job.last_seen = time.monotonic()
            is_pending = self.queue[job.name][1] == "PENDING"
            job.last_state = "queued" if is_pending else "running"
            return job.last_state
        has_left_word = is_finished(run) or (run.output_dir / FAILED).exists()
        is_gone = has_left_word or time.monotonic() - job.last_seen > GONE_AFTER
        return "ended" if is_gone else job.last_state

    def look(self) -> None:
        """Ask for the queue, unless it was asked for just now."""
        if time.monotonic() - self.asked > self.pause / 2:
            self.queue, self.asked = slurm_queue(), time.monotonic()

    def log(self, run: Stage) -> Path:
        """The output of submitit and Python."""
        return self.study_dir / JOBS / f"{self.jobs[run.output_dir].number}_0_log.out"


@dataclass
class Job:
    """The job of a run."""

    name: str
    number: str
    last_seen: float = field(default_factory=time.monotonic)
    last_state: str = "queued"


def job_name(run: Stage, study_dir: Path) -> str:
    """A name that no job of another run has, or of this one after a change."""
    made_by = json.dumps([str(run.output_dir.absolute()), description(run)], sort_keys=True)
    digest = hashlib.sha256(made_by.encode()).hexdigest()
    return re.sub(r"\W", "_", os.path.relpath(run.output_dir, study_dir)) + f"-{digest[:16]}"


def slurm_queue() -> dict[str, tuple[str, str]]:
    """The user's jobs that wait or run: number and state by name.

    By squeue, since sacct works on clusters alone that have a data base.
    """
    command = ["squeue", "--me", "--all", "--noheader", "--format=%i %T %j"]
    for seconds in RETRIES:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if not asked.returncode:
            lines = (line.split(" ", 2) for line in asked.stdout.splitlines())
            return {name: (number, state) for number, state, name in lines}
        time.sleep(seconds)
    raise UserError(f"Slurm does not answer: {asked.stderr.strip()}")
