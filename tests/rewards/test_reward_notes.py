"""Claim: what a reward function logs is kept by name, and what cannot be logged is refused.

Whole runs are in `test_token_records`.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

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
