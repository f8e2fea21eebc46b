"""Claim: the rows of the next step are packed while the device computes, before the host waits."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import train_sft
from common import data
from common.config.stages import SFTConfig
from common.model import optim

pytestmark = pytest.mark.usefixtures("process_group", "without_pictures")


def test_the_next_step_is_made_before_an_update_waits(tmp_path: Path, tiny_gpt2: Path) -> None:
    """Once each, and none behind the last step."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args: events.append(name) or function(*args)

    flags: dict[str, Any] = {"dataset_name": "synthetic", "num_train_rows": 12, "batch_size": 4}
    flags |= {"tokenizer_name_or_path": "synthetic", "dataset_test_split": "", "max_steps": 3}
    flags |= {"model_name_or_path": str(tiny_gpt2), "output_dir": str(tmp_path / "run")}
    flags |= {"num_sample_prompts": 0, "self_check": False, "max_prompt_length": 96}
    with (
        mock.patch.object(data, "micro_batches", noted("made", data.micro_batches)),
        mock.patch.object(optim, "clip_and_step", noted("update", optim.clip_and_step)),
    ):
        train_sft.main(SFTConfig(**flags))
    assert events == ["made", "made", "update", "made", "update", "update"]
