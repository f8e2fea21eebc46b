"""Claim: runs start when what they build on is finished, and a failure holds back no others.

The same with one at a time and with processes of this host, which submitit starts; a driver that
was killed waits for what it has left. Jobs of Slurm are in `test_slurm.py`. About
`experiments.runs.engine` and `experiments.runs.executors`.
"""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import ROOT, environment
from rich.console import Console

from common.config.parser import parse
from common.errors import UserError
from experiments.runs import executors, stages
from experiments.runs.engine import Study, run_stages
from experiments.runs.executors import Apart, EngineFlags
from experiments.runs.stages import Stage, StageFailed, is_finished

SCRIPT = """
import signal, sys, time
from pathlib import Path

flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if "=" in word)
folder, mode = Path(flags["output_dir"]), flags.get("mode", "")
lines = (folder.parent / "lines.txt").open("a")
print(folder.name, "begins", file=lines, flush=True)

def stop(number, _):
    (folder / "step_1").touch()
    print(f"stopped after step 1 by {signal.Signals(number).name}", flush=True)
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, stop)
if mode == "meet":  # the other run must be running
    deadline = time.monotonic() + 60
    (folder.parent / f"{folder.name}.here").touch()
    while len(list(folder.parent.glob("*.here"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
if mode == "wait":
    while not (folder.parent / "go").exists():
        time.sleep(0.05)
if mode == "refuse":
    sys.exit("error: --mode is refuse; it must not be.")
print(folder.name, "ends", file=lines, flush=True)
"""
DRIVER = """
import sys
from pathlib import Path
from experiments.runs.engine import run_stages
from experiments.runs.executors import EngineFlags
from experiments.runs.stages import Stage, exit_with_status

folder, parallel = Path(sys.argv[1]), int(sys.argv[2])
runs = [Stage(str(folder / "script.py"), folder / name, flags={"mode": "wait"}) for name in "ab"]
exit_with_status(lambda: run_stages(runs, EngineFlags(parallel=parallel), folder))
"""
AT_ONCE = EngineFlags(parallel=2)


@pytest.fixture(autouse=True)
def driver_of_this_project(monkeypatch, tmp_path):
    """The processes find the project's modules, and every look at them takes less time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(executors.Processes, "pause", 0.05)
    (tmp_path / "script.py").write_text(SCRIPT)


def stage(folder: Path, name: str, **flags) -> Stage:
    return Stage(str(folder / "script.py"), folder / name, flags=flags)


def lines(folder: Path) -> list[str]:
    """The lines of the scripts, in order."""
    file = folder / "lines.txt"
    return file.read_text().splitlines() if file.exists() else []


APART = """
import sys
from pathlib import Path
from experiments.runs.executors import Apart
from experiments.runs.stages import Stage

folder = Path(sys.argv[1])
Apart(Stage(str(folder / "script.py"), folder / "one"))()
sys.exit("torch" in sys.modules)
"""


def test_what_waits_for_a_run_does_not_import_torch(tmp_path):
    """A driver's processes, one a run, took 1.7 seconds of a CPU each before they started it."""
    result = subprocess.run([sys.executable, "-c", APART, str(tmp_path)], check=False)
    assert result.returncode == 0
    assert lines(tmp_path) == ["one begins", "one ends"]


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_run_starts_after_what_it_builds_on(tmp_path, parallel):
    last = stage(tmp_path, "last", models=[f"{tmp_path}/first/model", "hub/name"])
    near = stage(tmp_path, "first_of_all")  # builds on nothing, as its name is only alike
    run_stages([last, stage(tmp_path, "first"), near], EngineFlags(parallel=parallel), tmp_path)
    seen = lines(tmp_path)
    assert seen.index("first ends") < seen.index("last begins")
    assert len(seen) == 6
    run_stages([last, stage(tmp_path, "first"), near], AT_ONCE, tmp_path)
    assert lines(tmp_path) == seen, "finished runs are not repeated"


def test_runs_that_build_on_nothing_run_at_once(tmp_path, capsys):
    run_stages([stage(tmp_path, name, mode="meet") for name in "ab"], AT_ONCE, tmp_path)
    assert capsys.readouterr().out.count("2 running") == 1
    assert all((tmp_path / name / "stage.log").exists() for name in "ab")


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_failure_holds_back_what_builds_on_it_and_no_others(tmp_path, parallel):
    bad = stage(tmp_path, "bad", mode="refuse")
    child = stage(tmp_path, "child", model=f"{bad.output_dir}/model")
    other = stage(tmp_path, "other")
    with pytest.raises(UserError, match=r"bad: --mode is refuse.* Not made, since .*/child\."):
        run_stages([bad, child, other], EngineFlags(parallel=parallel), tmp_path)
    assert [is_finished(run) for run in (bad, child, other)] == [False, False, True]
    mended = [replace(bad, flags={}), child, other]
    run_stages(mended, EngineFlags(parallel=parallel), tmp_path)
    assert lines(tmp_path).count("other begins") == 1
    assert not (bad.output_dir / "failed.json").exists()


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_takes_its_runs_along_or_finds_them(tmp_path, parallel, number):
    (tmp_path / "driver.py").write_text(DRIVER)
    words = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), str(parallel)]
    first = subprocess.Popen(words, env=environment(PYTHONPATH=str(ROOT)))
    while len(lines(tmp_path)) < parallel:
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(number)
    first.wait(60)
    assert (tmp_path / "a" / "step_1").exists() == (number == signal.SIGTERM), (
        "it saves, or goes on"
    )
    second = subprocess.Popen(words, env=environment(PYTHONPATH=str(ROOT)))
    time.sleep(1)
    (tmp_path / "go").touch()
    assert second.wait(120) == 0
    seen = lines(tmp_path)
    if number == signal.SIGKILL and parallel > 1:
        assert sorted(seen) == ["a begins", "a ends", "b begins", "b ends"], "none was made twice"
    assert {f"{name} ends" for name in "ab"} <= {*seen}


def test_each_of_several_runs_has_its_gpus_and_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,7")
    shares = [executors.share(first, 2, 2) for first in (0, 2)]
    assert [s["CUDA_VISIBLE_DEVICES"] for s in shares] == ["0,1", "4,7"]
    assert {s["OMP_NUM_THREADS"] for s in shares} == {"2"}
    assert executors.share(2, 1, 2)["CUDA_VISIBLE_DEVICES"] == "4", "beside a run on the first two"
    many = [executors.share(slot, 1, 8)["CUDA_VISIBLE_DEVICES"] for slot in range(8)]
    assert many == ["0", "1", "4", "7"] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert executors.share(0, 1, 8)["OMP_NUM_THREADS"] == "3"


def test_the_screen_of_a_terminal_has_the_counts_and_the_runs_with_their_steps(tmp_path):
    study = Study([Stage("train.py", tmp_path / name) for name in "abcd"], executors.Here())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 30}\n{"step": 40}\n')
    for folder, state in zip(study.runs, ("finished", "running", "failed"), strict=False):
        study.note(folder, state)
    text = io.StringIO()
    Console(file=text, width=200).print(study.table())
    first, *rest = text.getvalue().splitlines()
    assert first == "1 of 4 finished, 1 running, 1 waiting, 1 failed, 0 min so far"
    assert [line.split() for line in rest] == [
        [str(tmp_path / "c"), "failed"],
        [str(tmp_path / "b"), "running", "step", "40"],
    ]


@pytest.mark.parametrize("saves", [True, False])
def test_before_the_time_limit_a_job_that_has_saved_is_queued_again(tmp_path, monkeypatch, saves):
    asked: list[list[str]] = []
    monkeypatch.setattr(executors.subprocess, "run", lambda words, check: asked.append(words))
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def make(run: Stage) -> None:
        if saves:
            (run.output_dir / "checkpoints" / "step_1").mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

    monkeypatch.setattr(stages, "run", make)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        Apart(Stage("script.py", tmp_path))()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert asked == ([["scontrol", "requeue", "7"]] if saves else [])
    assert (tmp_path / "failed.json").exists() != saves
    if not saves:
        error = executors.failure_of(Stage("script.py", tmp_path), tmp_path)
        assert str(error).endswith("before anything was saved; give it more --slurm_minutes.")


def test_what_fails_unexpectedly_leaves_its_traceback(tmp_path, monkeypatch):
    def make(run: Stage) -> None:
        raise KeyError("weights")

    monkeypatch.setattr(stages, "run", make)
    run = Stage("script.py", tmp_path)
    executors.attempt(run)
    error = executors.failure_of(run, tmp_path)
    assert isinstance(error, StageFailed)
    assert "test_many_runs.py" in str(error)
    (tmp_path / "failed.json").unlink()
    assert "last words are in 7.out or " in str(executors.failure_of(run, Path("7.out")))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--parallel", "-1"], "--parallel is -1; it must be at least 0"),
        (["--slurm_options", "exclusive"], "'exclusive'; it must be NAME=VALUE"),
    ],
)
def test_flags_that_no_executor_has_are_refused(words, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(EngineFlags, words)


def test_without_slurm_a_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match='--executor is slurm: Could not detect "srun"'):
        run_stages([stage(tmp_path, "a")], EngineFlags(executor="slurm"), tmp_path)
