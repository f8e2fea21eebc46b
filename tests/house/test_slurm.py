"""Claims about `assets/slurm/train.sbatch`, without Slurm: stand-ins for `srun` and `scontrol`.

The `srun` of these tests starts the step twice on this machine, as two hosts. USR1 to every process
of the step, as Slurm sends it before the time limit, leaves torchrun alive and reaches the training
processes; a run that has saved and stopped is queued again, one that is finished is not, and
neither is one that fails without a new checkpoint, or that was cancelled. About
`assets/slurm/train.sbatch`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import ROOT, environment

JOB = "4711"
SBATCH = ROOT / "assets" / "slurm" / "train.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
pids=() status=0
for node in 0 1; do
    SLURM_NODEID=$node SLURM_NNODES=2 "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) case $2 in
        hostnames) printf 'localhost\\nlocalhost\\n' ;;
        job) echo "JobId=$3 JobName=summarize"; echo "   JobState=$JOB_STATE Reason=None" ;;
    esac ;;
    requeue) echo "$2" >> "$(dirname "$0")/requeued" ;;
esac
"""
# In place of a stage: what it does is in the file `plan` of its output_dir.
STAGE = """
import os, signal, sys, time
from pathlib import Path

output = Path(sys.argv[sys.argv.index("--output_dir") + 1])
plan = (output / "plan").read_text()
assert sys.argv[-2:] == ["--run_name", "two words"], sys.argv
signals = []
if plan == "stop":
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, "inherited"
    signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
    (output / f"listens_{os.environ['RANK']}_of_{os.environ['WORLD_SIZE']}").touch()
    deadline = time.monotonic() + 300
    while not signals and time.monotonic() < deadline:
        time.sleep(0.05)
if "finish" in plan:
    (output / "model").mkdir(exist_ok=True)
    (output / "model" / "config.json").write_text("{}")
elif "save" in plan or signals:
    (output / "checkpoints" / "step_00000001").mkdir(parents=True, exist_ok=True)
sys.exit(3 if "fail" in plan else 0)
"""
# In place of torchrun, where the test is not about it: the script follows --max-restarts and its 0.
TORCHRUN = """#!/bin/bash
while [[ $1 != --max-restarts ]]; do shift; done
shift 2
exec "$PYTHON" "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds `bin` with the stand-ins, `stage.py`, and the run's folder `run`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "stage.py").write_text(STAGE)
    return tmp_path


def submit(folder: Path, plan: str, state: str = "RUNNING") -> subprocess.Popen:
    """Start the job script; Slurm says that the job is in this state."""
    (folder / "run" / "plan").write_text(plan)
    path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {
        "PATH": os.pathsep.join(path),
        "PYTHON": sys.executable,
        "SLURM_JOB_ID": JOB,
        "JOB_STATE": state,
        "SLURM_JOB_NODELIST": "localhost,localhost",
    }
    script = [str(SBATCH), str(folder / "stage.py"), str(folder / "run"), "--run_name", "two words"]
    return subprocess.Popen(
        ["bash", *script], env=environment(**variables), stdout=subprocess.PIPE, text=True
    )


def requeued(folder: Path) -> list[str]:
    """The jobs that were queued again."""
    file = folder / "bin" / "requeued"
    return file.read_text().split() if file.exists() else []


def processes_of_step(folder: Path) -> list[int]:
    """What Slurm would signal: the processes of the step, on both hosts."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        ours = any(v.startswith(f"PATH={folder}".encode()) for v in variables)
        if ours and any(v.startswith(b"SLURM_NODEID=") for v in variables):
            pids.append(int(path.name))
    return pids


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_usr1_stops_the_training_processes_and_queues_the_job_again(folder: Path) -> None:
    job = submit(folder, "stop")
    listening = [folder / "run" / f"listens_{rank}_of_2" for rank in (0, 1)]
    try:
        deadline = time.monotonic() + 300
        while not all(file.exists() for file in listening):
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < deadline, "the training processes did not start"
            time.sleep(0.05)
        pids = processes_of_step(folder)
        assert len(pids) == 4  # torchrun and a training process, twice
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        output, _ = job.communicate(timeout=300)
    finally:
        for pid in [*processes_of_step(folder), job.pid]:
            if pid != job.pid or job.poll() is None:
                os.kill(pid, signal.SIGKILL)
    assert job.returncode == 0, output
    assert "the run is not finished (status 0): job 4711 is queued again" in output
    assert requeued(folder) == [JOB]


@pytest.mark.parametrize(
    ("plan", "state", "status", "text"),
    [
        ("finish", "RUNNING", 0, ""),
        ("save", "RUNNING", 0, "not finished (status 0)"),
        ("save, fail", "RUNNING", 0, "not finished (status 3)"),
        ("save, fail", "COMPLETING", 0, "not finished (status 3)"),
        ("save, fail", "CANCELLED", 3, "job 4711 was cancelled"),
        ("fail", "RUNNING", 3, "status 3 and no new checkpoint: job 4711 is not repeated"),
        ("nothing", "RUNNING", 1, "status 0 and no new checkpoint: job 4711 is not repeated"),
    ],
)
def test_what_is_queued_again(folder: Path, plan: str, state: str, status: int, text: str) -> None:
    (folder / "bin" / "torchrun").write_text(TORCHRUN)
    (folder / "bin" / "torchrun").chmod(0o755)
    for old in ("model", "checkpoints/step_00000000"):  # of a job before
        (folder / "run" / old).mkdir(parents=True)
        os.utime(folder / "run" / old, (0, 0))
    (folder / "run" / "model" / "config.json").touch()
    os.utime(folder / "run" / "model" / "config.json", (0, 0))
    job = submit(folder, plan, state)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == status
    assert requeued(folder) == ([JOB] if "not finished" in text else [])
    assert text in output


def test_slurm_is_asked_for_what_the_comments_say() -> None:
    text = SBATCH.read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert directives["signal"] == "USR1@300"  # not B:, which is for the batch script alone
    assert directives["ntasks-per-node"] == "1"  # torchrun starts the processes of a host
    assert "requeue" in directives
    assert text.index("#SBATCH --output") < text.index("set -uo")  # Slurm reads up to a command
    assert subprocess.run(["bash", "-n", str(SBATCH)], check=False).returncode == 0
