"""Claim: between two waits for the device the host has little to do.

The rows of the next step are packed while the device computes; and a step of GPT-2 small's depth in
bfloat16 makes as many Python calls as a table says, most of them in torch and transformers. And a
run says what a step takes before a long silence. About `common.run` and `common.record.forecast`.
"""

import cProfile
import json
import pstats
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import train_sft
from common import data
from common.config.stages import SFTConfig
from common.model import optim, shared_attention
from common.record import forecast
from common.record.forecast import Forecast
from common.record.terminal import format_seconds
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


def lines_at_updates(config: SFTConfig, capsys: Any) -> list[list[str]]:
    """What a run printed about its steps before each update, and behind the last one."""
    texts: list[str] = []

    def noted(*args: Any) -> Any:
        texts.append(capsys.readouterr().out)
        return step(*args)

    step = optim.clip_and_step
    with mock.patch.object(optim, "clip_and_step", noted):
        train_sft.main(config)
    texts.append(capsys.readouterr().out)
    return [re.findall(r"^SFT: (.*)$", text, re.MULTILINE) for text in texts]


WORK = r"a step has 4 rows, about [\d.,]+ tokens, [\d.e-]+ TFLOP"
TAKES = r"about [\d.]+ m?s a step, [\d.]+ (s|min) for {}, \d+(\.\d+)? GB"  # of all tests so far


@pytest.mark.parametrize(("warmup_steps", "is_noted"), [(1, False), (2, True)])
def test_a_warmup_that_is_not_over_in_the_run_is_noted(
    warmup_steps: int, is_noted: bool, tmp_path: Path, tiny_gpt2: Path, capsys: Any
) -> None:
    flags = FLAGS | {"num_train_rows": 4, "batch_size": 2, "output_dir": str(tmp_path / "run")}
    flags |= {"model_name_or_path": str(tiny_gpt2), "max_steps": 2, "warmup_steps": warmup_steps}
    train_sft.main(SFTConfig(**flags))
    noted = "warning: the learning rate never reaches" in capsys.readouterr().out
    assert noted == is_noted


@pytest.mark.parametrize("is_long", [False, True])
def test_a_run_says_once_what_a_step_takes(
    is_long: bool, tmp_path: Path, tiny_gpt2: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Of a long step its first micro-batch tells; a run that goes on says it again."""
    monkeypatch.setattr(forecast, "SILENCE", 0.0 if is_long else 1e9)
    flags = FLAGS | {"num_train_rows": 12, "batch_size": 4, "micro_batch_size": 1, "save_steps": 2}
    flags |= {"model_name_or_path": str(tiny_gpt2), "output_dir": str(tmp_path / "run")}
    first, second, *rest = lines_at_updates(SFTConfig(**flags, max_steps=3), capsys)
    assert re.fullmatch(WORK, first.pop(0))
    assert (len(first), len(second)) == ((1, 0) if is_long else (0, 1))
    assert re.fullmatch(TAKES.format("the run"), (first + second)[0])
    assert rest == [[], []]
    longer = SFTConfig(**flags, max_steps=6, resume_from_checkpoint="latest")
    lines = sum(lines_at_updates(longer, capsys), [])
    assert re.fullmatch(TAKES.format("the rest of the run"), lines[-1])
    assert len(lines) == 2


def test_a_step_s_time_is_estimated_from_what_is_over(monkeypatch: Any) -> None:
    """Sampling is before the first of two updates, and not repeated for the second."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(forecast, "time", clock)
    step = Forecast(num_updates=2)
    clock.now += 60
    step.begin_update()
    clock.now += 10
    assert step.by_part([300, 200, 100], 1) == 60 + 2 * 20
    assert step.by_part([300, 200, 100], 2) is step.by_whole() is None
    step = Forecast(num_updates=2)
    for _ in range(2):
        step.begin_update()
        clock.now += 2
        assert step.by_part([1, 1], 1) is None
    clock.now += 0.5
    step.begin_update()
    assert step.by_whole() == 4.5
    step = Forecast(num_updates=2)
    step.begin_update()
    clock.now += 2
    step.begin_update()
    clock.now += 4
    assert step.by_part([1, 1], 1) == 8  # 6 s for one and a half of two


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "0.012 s"),
        (44.6, "45 s"),
        (350, "5.8 min"),
        (3.3 * 3600, "3.3 h"),
        (1e6, "12 days"),
    ],
)
def test_a_time_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_step_of_sft_makes_few_python_calls(tmp_path: Path) -> None:
    """The third of 64 rows; a GPU's kernel takes all ranges of its attention at once."""
    shape = {"model_type": "gpt2", "n_layer": 12, "n_embd": 32, "n_head": 2, "n_positions": 256}
    (tmp_path / "deep.json").write_text(json.dumps(shape))
    profile, steps = cProfile.Profile(), Run.steps

    def profiled(run: Run, *hooks: Any) -> Iterator[int]:
        for step in steps(run, *hooks):
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
