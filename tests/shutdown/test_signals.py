"""A real run that is sent a signal saves, says so and exits as a shell has it; again, it goes on.

Each of the four signals is sent to a process in mid-run, and only Slurm's is no failure; a signal
in the last evaluation, and a kill there, lose no step and find the model exported. About
`common.shutdown.signals`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import ROOT, SHORT_RUN, Script

from common.checkpoint import layout
from common.record.jsonl import read_jsonl

STEPS = 400
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere libraries do not survive a fork"
)


def start(folder: Path, **flags: object) -> Script:
    settings = {
        **SHORT_RUN,
        "output_dir": folder / "run",
        "model_name_or_path": ROOT / "assets" / "recipes" / "demo" / "gpt2-tiny.json",
        "tokenizer_name_or_path": "synthetic",
        "dataset_test_split": "",
        "num_train_rows": 32,
        "max_completion_length": 48,
        "batch_size": 2,
        "max_steps": STEPS,
        "self_check": "false",
        **flags,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return Script([ROOT / "train_sft.py", *words], folder / "log")


def wait_for(condition: Callable[[], bool], script: Script) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert script.poll() is None, script.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "status"), [("SIGTERM", 143), ("SIGUSR1", 0), ("SIGINT", 130), ("SIGHUP", 129)]
)
def test_a_signal_saves_and_ends_with_its_status(name: str, status: int, tmp_path: Path) -> None:
    script = start(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(read_jsonl(metrics)) >= 3, script)
    os.kill(script.pid, getattr(signal, name))
    assert script.wait(300) == status, script.log.read_text()
    log = script.log.read_text()
    assert f"{name}: saving and ending soon" in log
    (folder,) = layout.newest_first(tmp_path / "run")
    step = layout.step_of(folder)
    assert f"stopped after step {step} by {name}; the same command goes on from {folder}" in log
    assert [line["step"] for line in read_jsonl(metrics)] == list(range(1, step + 1))
    assert 3 <= step < STEPS


def test_a_kill_in_the_last_evaluation_loses_no_step(tmp_path: Path) -> None:
    flags = {"max_steps": 3, "save_steps": 2, "dataset_test_split": "validation"}
    flags |= {"num_eval_rows": 250, "micro_batch_tokens": 150}
    script, run = start(tmp_path, **flags), tmp_path / "run"
    written = (layout.folder_of(run, 3), run / "model")
    wait_for(lambda: all(folder.exists() for folder in written), script)
    os.kill(script.pid, signal.SIGKILL)
    assert script.wait(300) == -signal.SIGKILL
    assert all("eval_loss" not in line for line in read_jsonl(run / "metrics.jsonl"))
    again = start(tmp_path, **flags)
    assert again.wait(300) == 0, again.log.read_text()
    assert "resuming after step 3" in again.log.read_text()
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert "eval_loss" in lines[-1]
    assert (run / "model" / "model.safetensors").exists()
