"""Claims about `assets/slurm/train.sbatch`: a run is queued again until it is finished.

On a real Slurm of two nodes, by `make test-slurm`: after USR1 before the time limit, and after a
node was set down, a run ends in the bits of an undisturbed one; one that was cancelled is not
repeated, although it has saved, nor is one that fails. Stand-ins for `srun` and `scontrol` show
everywhere which jobs are queued again. About `assets/slurm/train.sbatch`.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_drill import differences
from ranks import ROOT, SHORT_RUN, environment, launch, run_stages
from slurm import call, slurm

SBATCH = ROOT / "assets" / "slurm" / "train.sbatch"
FLAGS = SHORT_RUN | {
    "dataset_test_split": "",
    "num_train_rows": 12,
    "max_completion_length": 16,
    "max_steps": 4,
    "save_steps": 4,
    "num_generations": 4,
    "entropy_coef": 0.1,
}
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
# The first start of a job waits for a signal in its third step.
REWARDS = """
import os
import time
from pathlib import Path

from common.shutdown import signals


def letters(completions, trainer_state):
    is_first = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
    if is_first and trainer_state.global_step == 2:
        Path(__file__).with_name("waiting_" + os.environ["SLURM_JOB_ID"]).touch()
        while not signals.received():
            time.sleep(0.05)
    return [float(text.count("e")) for text in completions]
"""


class Queue:
    """A real Slurm for runs of one command, which has been run without it in `folder / "whole"`."""

    def __init__(self, variables: dict[str, str], folder: Path, start: dict[str, str]) -> None:
        self.variables, self.folder = environment(**variables), folder
        (folder / "rewards.py").write_text(REWARDS)
        self.flags = FLAGS | start | {"reward_funcs": f"{folder}/rewards.py:letters"}
        flags = self.flags | {"output_dir": str(folder / "whole")}
        launch(run_stages, 2, folder, jobs=[{"stage": "grpo", "flags": flags}])

    def submit(self, name: str, minutes: int = 10, **flags: object) -> str:
        """Submit a run with the name of its folder; the number of its job."""
        options = ["--parsable", f"--time={minutes}", f"--output={self.folder / name}.log"]
        options += ["--gpus-per-node=0", "--cpus-per-task=1"]
        pairs = (self.flags | flags).items()
        words = [word for flag, value in pairs for word in (f"--{flag}", str(value))]
        script = [str(SBATCH), str(ROOT / "train_grpo.py"), str(self.folder / name), *words]
        return self.ask("sbatch", *options, *script)

    def ask(self, *command: str) -> str:
        return call(self.variables, *command)

    def show(self, job: str) -> dict[str, str]:
        """The fields of a job."""
        words = self.ask("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_signal(self, job: str) -> None:
        """Return when the job's run waits for one."""
        self.wait(job, (self.folder / f"waiting_{job}").exists)

    def end(self, job: str, state: str) -> str:
        """Wait until a job is in this state, and not in another end; its log."""
        self.wait(job, lambda: self.show(job)["JobState"] in (state, *ENDS))
        log = Path(self.show(job)["StdOut"]).read_text()
        assert self.show(job)["JobState"] == state, log
        return log

    def wait(self, job: str, condition: Callable[[], bool]) -> None:
        """Wait for five minutes at most."""
        deadline = time.monotonic() + 300
        while not condition():
            shown = self.show(job)
            assert time.monotonic() < deadline, f"{shown}\n{Path(shown['StdOut']).read_text()}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory, start_flags: dict[str, str]) -> Iterator[Queue]:
    folder = tmp_path_factory.mktemp("queue")
    with slurm(folder) as variables:
        yield Queue(variables, folder, start_flags)


@pytest.mark.slurm
def test_a_job_at_its_time_limit_saves_and_goes_on_in_the_same_bits(queue: Queue) -> None:
    # USR1 comes after one minute, or up to 30 s earlier. A job that is started again goes on.
    job = queue.submit("limit", minutes=6, resume_from_checkpoint="none")
    log = queue.end(job, "COMPLETED")
    assert f"the run is not finished (status 0): job {job} is queued again" in log
    assert "resuming after step 3" in log
    assert differences(queue.folder / "whole", queue.folder / "limit") == []


@pytest.mark.slurm
def test_a_job_goes_on_in_the_same_bits_when_a_node_was_down(queue: Queue) -> None:
    job = queue.submit("down", save_steps=1)
    queue.wait_for_signal(job)
    queue.ask("scontrol", "update", "NodeName=n2", "State=down", "Reason=test")
    queue.end(job, "PENDING")
    queue.ask("scontrol", "update", "NodeName=n2", "State=resume")
    assert "resuming after step" in queue.end(job, "COMPLETED")
    assert differences(queue.folder / "whole", queue.folder / "down") == []


@pytest.mark.slurm
def test_a_cancelled_job_is_not_queued_again(queue: Queue) -> None:
    job = queue.submit("cancelled")
    queue.wait_for_signal(job)
    queue.ask("scancel", job)
    queue.end(job, "CANCELLED")  # its log may end before the run: Slurm ends srun
    assert (queue.folder / "cancelled/checkpoints/step_00000003").is_dir()
    assert queue.ask("squeue", "--noheader") == ""


@pytest.mark.slurm
def test_a_job_that_fails_is_not_queued_again(queue: Queue) -> None:
    job = queue.submit("failed", reward_funcs="no_such_function")
    log = queue.end(job, "FAILED")
    assert f"no new checkpoint: job {job} is not repeated" in log
    assert queue.show(job)["Restarts"] == "0"


# ---- without Slurm -------------------------------------------------------------------------------

STAND_INS = {  # the clock of files ticks up to 10 ms: later files are newer only after a tick
    "srun": '#!/bin/bash\nsleep 0.05; cd run && eval "$PLAN"\n',
    "scontrol": '#!/bin/bash\n[ "$*" != "requeue 4711" ] || touch queued_again\n',
}
SAVE = "mkdir -p checkpoints/step_00000001"
FINISH = "echo '  \"finished\": true' > environment.json"
CASES = [  # what a run does, the status of its job, and a part of its output
    (FINISH, 0, ""),
    (f"{SAVE}; {FINISH}", 0, ""),
    (SAVE, 0, "not finished (status 0)"),
    (f"{SAVE}; exit 3", 0, "not finished (status 3)"),
    (f"{SAVE}.partial/x1; exit 3", 3, "status 3 and no new checkpoint: job 4711 is not repeated"),
    ("exit 0", 1, "status 0 and no new checkpoint: job 4711 is not repeated"),
]


@pytest.mark.parametrize(("plan", "status", "text"), CASES)
def test_what_is_queued_again(tmp_path: Path, plan: str, status: int, text: str) -> None:
    for name, script in STAND_INS.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    old = tmp_path / "run/checkpoints/step_00000000"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PLAN": plan}
    variables |= {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost"}
    job = subprocess.run(
        ["bash", str(SBATCH), "train_sft.py", "run"],
        cwd=tmp_path,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert job.returncode == status
    assert text in job.stdout
    assert (tmp_path / "queued_again").exists() == ("not finished" in text)
