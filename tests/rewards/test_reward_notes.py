"""Claim: what a reward function logs is recorded as the mean of its calls, whichever ranks call.

By hand what is kept and refused; and whole runs of GRPO on one rank and on two, of which one rank
logs a name that the other never hears of.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import SHORT_RUN, launch, run_stages

from common.record.jsonl import read_jsonl
from common.rewards.score import RewardFunctions, RewardLog


def scored(functions: dict[str, Any], **columns: Any) -> RewardLog:
    """What functions note about three completions."""
    ids = [[1], [2], [3]]
    rewards = RewardFunctions(functions, [1.0] * len(functions))
    return rewards(["p"] * 3, ["a", "bb", "ccc"], ids, columns).log


def noting(*calls: tuple[str, Any]) -> Any:
    """A reward function that logs values under names."""

    def function(completions: list[str], log_metric: Any, **rest: Any) -> list[float]:
        for name, value in calls:
            log_metric(name, value)
        return [0.0] * len(completions)

    return function


def test_every_call_adds_a_value_to_its_name():
    functions = {
        "a": noting(("right", 0.5), ("right", np.float32(1.5)), ("long", torch.tensor(3))),
        "b": noting(("right", True)),
    }
    assert scored(functions).metrics == {"right": [0.5, 1.5, 1.0], "long": [3.0]}


def test_a_column_has_a_place_for_every_completion():
    def some(completions: list[str], log_extra: Any, **rest: Any) -> list[float]:
        log_extra("length", [np.int64(len(text)) for text in completions])
        log_extra("parts", [tuple(text) for text in completions])
        return [0.0] * len(completions)

    choices = ["some", "other", "some"]
    notes = scored({"some": some, "other": noting()}, reward_funcs=choices)
    assert notes.columns == {"length": [1, None, 3], "parts": ["('a',)", None, "('c', 'c', 'c')"]}


REFUSED = [
    (("x", math.nan), r"log_metric\('x'\) got nan; it must be a finite number"),
    (("x", "1"), r"log_metric\('x'\) got '1'; it must be a finite number"),
    (("x", [1.0]), r"log_metric\('x'\) got \[1.0\]; it must be a finite number"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=str)
def test_what_cannot_be_logged_is_refused(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        scored({"judge": noting(call)})


def test_a_column_of_another_length_is_refused():
    def judge(completions: list[str], log_extra: Any, **rest: Any) -> list[float]:
        log_extra("length", [0, 0])
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"log_extra\('length'\) got 2 values for 3 completions"):
        scored({"judge": judge})


# ---- whole runs ----------------------------------------------------------------------------------

REWARD_FILE = """
import os

def judge(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    rank, step = int(os.environ.get("RANK", "0")), trainer_state.global_step
    log_metric("number", len(prompts))
    if rank == 0 and step % 2 == 1:
        log_metric("rare", step)
        log_metric("loss", 100.0)  # a name of ours: it does not reach our loss
    log_extra("tokens", [len(ids) for ids in completion_ids])
    return [len(set(text)) / 10 for text in completions]
"""
FLAGS = SHORT_RUN | {
    "dataset_test_split": "",
    "num_sample_prompts": 2,
    "num_train_rows": 8,
    "max_completion_length": 6,
    "num_generations": 3,
    "logging_steps": 2,
    "max_steps": 4,
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    start_flags: dict[str, str],
    process_group: None,
) -> dict[int, Path]:
    """A run on one rank and one on two."""
    folder = tmp_path_factory.mktemp("notes")
    (folder / "judge.py").write_text(REWARD_FILE)
    flags = FLAGS | start_flags | {"reward_funcs": f"{folder}/judge.py:judge"}
    jobs = [
        {"stage": "grpo", "flags": flags | {"output_dir": str(folder / str(n))}} for n in (1, 2)
    ]
    run_stages(jobs[:1])  # in this process: quicker than a launch
    launch(run_stages, 2, folder, jobs=jobs[1:])
    return {n: folder / str(n) for n in (1, 2)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_mean_over_ranks_and_calls_is_recorded(runs: dict[int, Path], num_ranks: int):
    first, second = read_jsonl(runs[num_ranks] / "metrics.jsonl")
    for line, step in ((first, 1), (second, 3)):  # of the steps 0 and 1, and of 2 and 3
        assert line["logged/number"] == 12 / num_ranks
        assert line["logged/rare"] == step
        assert line["logged/loss"] == 100
        assert abs(line["loss"]) < 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_columns_stand_in_the_table_of_samples(runs: dict[int, Path], num_ranks: int):
    rows = read_jsonl(runs[num_ranks] / "samples.jsonl")
    assert len(rows) == 2 * 3
    for row in rows:
        assert 1 <= row["logged/tokens"] <= 6
        assert row["stopped by"] == "stop token" or row["logged/tokens"] == 6
