"""Stages run in this process as a user runs them, to the sentence with which they refuse."""

import importlib
import os
import sys
from typing import Any

import pytest
import torch.distributed as dist

from common import launch
from common.exits import failures, signals
from common.record import output_lock

STAGES = {
    "train_sft": "SFTConfig",
    "train_reward": "RewardConfig",
    "train_dpo": "DPOConfig",
    "train_grpo": "GRPOConfig",
    "evaluate": "EvaluateConfig",
}
BASE = {
    "output_dir": "run",
    "model_name_or_path": "policy",
    "dataset_test_split": "",
    "max_prompt_length": 40,
    "max_completion_length": 20,
    "batch_size": 2,
    "max_steps": 1,
}
DATA = {"train_sft": "sft", "train_grpo": "sft"}  # the others read pairs


def arguments(stage: str, flags: dict[str, Any]) -> list[str]:
    """A command line that runs, but for the flags given."""
    values = {**BASE, "dataset_name": DATA.get(stage, "pairs")}
    if stage == "train_grpo":
        values["reward_funcs"] = "rewards.py:lengths"
    if stage == "evaluate":
        values = {**values, "policies": "policy", "dataset_test_split": "train"}
        idle = {"batch_size", "max_steps"}
        idle |= {"model_name_or_path"} if "tokenizer_name_or_path" in flags else set()
        values = {k: v for k, v in values.items() if k not in idle}
    argv = []
    for name, value in (values | flags).items():
        argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv


class Refusals:
    """Runs a stage in this process, as its command does, to the sentence with which it refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setattr(launch, "close_and_exit", self.leave)

    @staticmethod
    def leave(status: int) -> None:
        raise SystemExit(status)

    def status(self, stage: str, argv: list[str]) -> int:
        """Exit status of a run that may come to its end: then 0."""
        module = importlib.import_module(stage)
        self.monkeypatch.setattr(sys, "argv", [f"{stage}.py", *argv])
        self.monkeypatch.setattr(dist, "destroy_process_group", lambda *_: None)
        # A run before this one has left its steps.
        self.monkeypatch.setattr(failures, "_progress", None)
        # Else a signal to pytest would not end it, but stop every run of the tests after this one.
        self.monkeypatch.setattr(signals, "listen", lambda *_, **__: None)
        try:
            launch.run(module.main, getattr(module, STAGES[stage]))
        except SystemExit as ended:
            return int(ended.code)
        return 0

    def run(self, stage: str, argv: list[str]) -> tuple[int, str]:
        """Exit status and what is on the standard error."""
        self.capsys.readouterr()
        return self.status(stage, argv), self.capsys.readouterr().err

    def sentence(self, stage: str, argv: list[str]) -> str:
        """The one sentence, with nothing written."""
        before = everything()
        status, errors = self.run(stage, argv)
        assert status == 2, errors
        assert "Traceback" not in errors
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        check_sentence(line)
        assert everything() == before
        return line


def everything() -> dict[str, tuple[int, int]]:
    """Size and time of all that is in the working directory, but for locks, which mean nothing."""
    found = {}
    for parent, folders, files in os.walk("."):
        for name in {*folders, *files} - {output_lock.NAME}:
            status = os.lstat(os.path.join(parent, name))
            found[os.path.join(parent, name)] = (status.st_size, status.st_mtime_ns)
    return found


def check_sentence(message: str) -> None:
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 450
    assert message.count(". ") == 0, "more than one sentence"
