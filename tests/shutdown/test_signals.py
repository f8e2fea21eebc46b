"""A real run that is sent a signal saves, says so and exits with status 0; again, it goes on.

Each of the three signals is sent to a process in mid-run; a signal in the last evaluation, and a
kill there, lose no step and find the model exported.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import ROOT, environment

from common.checkpoint import layout
from common.record.jsonl import read_jsonl

STEPS = 400


def start(output_dir: Path, inputs: Path, **flags: object) -> subprocess.Popen[str]:
    given = {
        "output_dir": output_dir,
        "model_name_or_path": inputs,
        "tokenizer_name_or_path": "synthetic",
        "dataset_name": "synthetic",
        "dataset_test_split": "",
        "num_train_rows": 32,
        "num_sample_prompts": 0,
        "max_prompt_length": 128,
        "max_completion_length": 48,
        "batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "self_check": "false",
        **flags,
    }
    command = [sys.executable, str(ROOT / "train_sft.py")]
    command += [str(word) for key, value in given.items() for word in (f"--{key}", value)]
    out = subprocess.PIPE
    return subprocess.Popen(command, env=environment(), stdout=out, stderr=out, text=True)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_saves_and_ends_with_success(name: str, tmp_path: Path) -> None:
    inputs = ROOT / "assets" / "recipes" / "demo" / "gpt2-tiny.json"
    process = start(tmp_path, inputs)
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(read_jsonl(metrics)) >= 3, process)
    process.send_signal(getattr(signal, name))
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"{name}: saving and ending soon" in errors
    (folder,) = layout.newest_first(tmp_path)
    step = layout.step_of(folder)
    assert f"stopped after step {step} by {name}; the same command goes on from {folder}" in out
    assert [line["step"] for line in read_jsonl(metrics)] == list(range(1, step + 1))
    assert 3 <= step < STEPS


def test_a_kill_in_the_last_evaluation_loses_no_step(tmp_path: Path) -> None:
    inputs = ROOT / "assets" / "recipes" / "demo" / "gpt2-tiny.json"
    flags = {"max_steps": 3, "save_steps": 2, "dataset_test_split": "validation"}
    process = start(tmp_path, inputs, num_eval_rows=250, micro_batch_tokens=150, **flags)
    made = (layout.folder_of(tmp_path, 3), tmp_path / "model")
    wait_for(lambda: all(folder.exists() for folder in made), process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    assert all("eval_loss" not in line for line in read_jsonl(tmp_path / "metrics.jsonl"))
    again = start(tmp_path, inputs, num_eval_rows=250, micro_batch_tokens=150, **flags)
    out, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert "resuming after step 3" in out
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert "eval_loss" in lines[-1]
    assert (tmp_path / "model" / "model.safetensors").exists()
