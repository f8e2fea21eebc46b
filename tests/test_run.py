"""Claim: between two waits for the device the host has little to do.

The rows of the next step are packed while the device computes; and a step of GPT-2 small's depth in
bfloat16 makes as many Python calls as a table says, most of them in torch and transformers. About
`common.run`.
"""

import cProfile
import json
import pstats
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import train_sft
from common import data
from common.config.stages import SFTConfig
from common.model import optim, shared_attention
from common.run import Run

pytestmark = pytest.mark.usefixtures("process_group", "without_pictures")
FLAGS: dict[str, Any] = {"dataset_name": "synthetic", "tokenizer_name_or_path": "synthetic"}
FLAGS |= {"dataset_test_split": "", "num_sample_prompts": 0, "self_check": False}
FLAGS |= {"max_prompt_length": 96, "logging_steps": 100}
MOST_CALLS = 9_000  # FSDP made 167,120, TRL 1.16 makes 20,206


def test_the_next_step_is_made_before_an_update_waits(tmp_path: Path, tiny_gpt2: Path) -> None:
    """Once each, and none behind the last step."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args: events.append(name) or function(*args)

    flags = FLAGS | {"num_train_rows": 12, "batch_size": 4, "max_steps": 3}
    flags |= {"model_name_or_path": str(tiny_gpt2), "output_dir": str(tmp_path / "run")}
    with (
        mock.patch.object(data, "micro_batches", noted("made", data.micro_batches)),
        mock.patch.object(optim, "clip_and_step", noted("update", optim.clip_and_step)),
    ):
        train_sft.main(SFTConfig(**flags))
    assert events == ["made", "made", "update", "made", "update", "update"]


def test_a_step_of_sft_makes_few_python_calls(tmp_path: Path) -> None:
    """The third of 64 rows; a GPU's kernel takes all ranges of its attention at once."""
    shape = {"model_type": "gpt2", "n_layer": 12, "n_embd": 32, "n_head": 2, "n_positions": 256}
    (tmp_path / "deep.json").write_text(json.dumps(shape))
    profile, steps = cProfile.Profile(), Run.steps

    def profiled(run: Run) -> Iterator[int]:
        for step in steps(run):
            if step == 2:
                profile.enable()
            yield step
            profile.disable()

    def as_one(query_ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
        return [(slice(0, int(query_ends[-1])), slice(0, int(key_ends[-1])))]

    flags = FLAGS | {"num_train_rows": 256, "batch_size": 64, "max_steps": 4, "bf16": True}
    flags |= {"model_name_or_path": str(tmp_path / "deep.json"), "micro_batch_tokens": 16384}
    with (
        mock.patch.object(Run, "steps", profiled),
        mock.patch.object(shared_attention, "ranges", as_one),
    ):
        train_sft.main(SFTConfig(**flags, output_dir=str(tmp_path / "run")))
    assert 1000 < pstats.Stats(profile).total_calls < MOST_CALLS
