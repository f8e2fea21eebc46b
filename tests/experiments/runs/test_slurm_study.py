"""Claim: by real Slurm a study of six runs comes to its end, whatever is ended in between.

Its driver is killed and started again, a node is set down, a run is stopped as before the time
limit, another one fails. About `experiments.runs.slurm` and `experiments.runs.engine`.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, environment
from slurm import call, slurm

pytestmark = pytest.mark.slurm
SCRIPT = """
import signal, sys, time
from pathlib import Path

flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = Path(flags["output_dir"])
checkpoints = folder / "checkpoints"
checkpoints.mkdir(exist_ok=True)
begun = len(list(checkpoints.iterdir()))
lines = (folder / "lines.txt").open("a")
print("begins at", begun, file=lines, flush=True)
signals = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: signals.append(number))
for step in range(begun, int(flags["steps"])):
    time.sleep(0.25)
    (checkpoints / f"step_{step}").touch()
    if signals:
        print(f"stopped after step {step} by {signal.Signals(signals[0]).name}", flush=True)
        sys.exit(0 if signals[0] == signal.SIGUSR1 else 128 + signals[0])
if flags.get("mode") == "fail" and not (folder.parent / "mended").exists():
    raise ZeroDivisionError("as asked")
print("ends at", len(list(checkpoints.iterdir())), file=lines, flush=True)
"""
DRIVER = """
import sys
from pathlib import Path
from experiments.runs.engine import run_stages
from experiments.runs.executors import EngineFlags
from experiments.runs.stages import Stage, exit_with_status

folder, steps = Path(sys.argv[1]), {0: 60, 1: 10}
script, runs = str(folder / "script.py"), []
for seed in (0, 1):
    first = Stage(script, folder / f"first_{seed}", flags={"steps": steps[seed]})
    flags = {"steps": 10, "model": f"{first.output_dir}/model"}
    second = Stage(script, folder / f"second_{seed}", flags=flags)
    third = Stage(script, folder / f"third_{seed}", flags=flags | {"mode": ["", "fail"][seed]})
    runs += [first, second, third]
flags = {"executor": "slurm", "slurm_gpus": 0, "slurm_minutes": 9}
engine = EngineFlags(**flags, slurm_options=["comment=a study"])
exit_with_status(lambda: run_stages(runs, engine, folder))
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a Slurm of two nodes, whose jobs find the project's modules."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "driver.py").write_text(DRIVER)
    with slurm(tmp_path) as variables:
        yield environment(**variables, PYTHONPATH=str(ROOT))


def test_a_study_survives_its_driver_a_node_and_the_time_limit(tmp_path, cluster):
    words = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)]

    def jobs() -> dict[str, list[str]]:
        """Number, state and node of each job, by its run."""
        rows = call(cluster, "squeue", "-h", "-o", "%j %i %T %N").splitlines()
        return {row.split("-")[0]: row.split()[1:] for row in rows}

    def wait_for(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, (jobs(), lines("first_0"))
            time.sleep(0.2)

    def lines(run: str) -> list[str]:
        file = tmp_path / run / "lines.txt"
        return file.read_text().splitlines() if file.exists() else []

    driver = subprocess.Popen(words, env=cluster)
    wait_for(lambda: lines("first_0"))
    before = jobs()
    driver.kill()
    driver.wait()
    driver = subprocess.Popen(words, env=cluster)
    # As before the time limit: the run saves; the job is queued again
    call(cluster, "scancel", "--signal=USR1", before["first_0"][0])
    wait_for(lambda: len(lines("first_0")) == 2)
    number, _, node = jobs()["first_0"]
    assert number == before["first_0"][0]
    call(cluster, "scontrol", "update", f"NodeName={node}", "State=down", "Reason=test")
    wait_for(lambda: len(lines("first_0")) == 3)
    assert jobs()["first_0"][0] == number
    assert jobs()["first_0"][2] != node
    call(cluster, "scontrol", "update", f"NodeName={node}", "State=resume")
    assert driver.wait(240) == 1  # third_1 fails
    begun = [int(line.split()[-1]) for line in lines("first_0")[:3]]
    assert 0 == begun[0] < begun[1] <= begun[2] < 60, "it goes on where it was"
    runs = [f"{name}_{seed}" for name in ("first", "second", "third") for seed in (0, 1)]
    assert [lines(run)[-1] for run in runs] == ["ends at 60", *["ends at 10"] * 4, "begins at 0"]
    assert [len(lines(run)) for run in runs] == [4, 2, 2, 2, 2, 1], "no other run was made twice"
    assert "as asked" in (tmp_path / "third_1" / "failed.json").read_text()
    (tmp_path / "mended").touch()
    again = subprocess.run(words, env=cluster, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("finished before") == 5
    assert lines("third_1")[-1] == "ends at 10"


def test_a_driver_that_is_asked_to_end_cancels_its_jobs(tmp_path, cluster):
    words = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)]
    driver = subprocess.Popen(words, env=cluster)
    while not (tmp_path / "first_0" / "lines.txt").exists():
        assert driver.poll() is None
        time.sleep(0.2)
    driver.terminate()
    assert driver.wait(60) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 60
    while call(cluster, "squeue", "-h"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    log = (tmp_path / "first_0" / "stage.log").read_text()
    assert "by SIGTERM" in log, "it has saved"
