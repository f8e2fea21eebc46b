"""Claim: a function that rewards steps trains each token on the steps that end at it or later.

Process supervision (DeepSeekMath section 4.1.3), from the function's pairs through the scorer of a
run to the advantages of tokens, on numbers worked out by hand. What is selected on and logged is
the sum of a completion's step rewards.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from common.advantages import EPSILON, penalise_steps, step_advantages
from common.data import Example
from common.errors import UserError
from common.padding import right_pad
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts

FILE = """
def steps(prompts, completions, completion_ids, **columns):
    '''1 for each step that ends in the token 5, else 0; a step ends at 5 and at 6.'''
    return [
        [(place, float(token == 5)) for place, token in enumerate(ids) if token in (5, 6)]
        for ids in completion_ids
    ]

def stops(completion_ids, has_stop, **columns):
    return [0.5 if stop else None for stop in has_stop]
"""


def returned(*values: Any) -> Any:
    return lambda completions, **columns: list(values)


def call(functions: dict[str, Any], weights: list[float], lengths: list[int]) -> Any:
    ids = [[7] * length for length in lengths]
    texts = [f"c{i}" for i in range(len(lengths))]
    return RewardFunctions(functions, weights)(texts, texts, ids, {})


def test_the_reward_of_a_completion_is_the_sum_of_its_steps():
    found = call({"s": returned([(1, 0.25), (3, 1.0)], [(0, -2)])}, [2.0], [4, 1])
    assert found.steps == [{1: 0.5, 3: 2.0}, {0: -4.0}]
    assert found.by_function["s"].tolist() == [1.25, -2.0]
    assert found.total.tolist() == [2.5, -4.0]


def test_another_function_s_reward_is_a_step_that_ends_with_the_completion():
    functions = {
        "s": returned([(1, 1.0), (3, 1.0)], [(0, 3.0)], None),
        "a": returned(10, 20, 30),
        "watched": returned(5, 5, 5),
    }
    found = call(functions, [1.0, 0.5, 0.0], [4, 2, 3])
    assert found.steps == [{1: 1.0, 3: 6.0}, {0: 3.0, 1: 10.0}, {2: 15.0}]
    assert found.total.tolist() == [sum(steps.values()) for steps in found.steps]
    assert found.by_function["s"].tolist()[:2] == [2.0, 3.0]
    assert math.isnan(found.by_function["s"][2])


def test_a_function_that_is_only_watched_adds_no_step():
    """A step of reward 0 would move the mean of all steps."""
    functions = {"s": returned([(0, 1.0)]), "watched": returned(5), "also": returned([(1, 9.0)])}
    found = call(functions, [1.0, 0.0, 0.0], [3])
    assert found.steps == [{0: 1.0}]
    assert found.by_function["also"].tolist() == [9.0]
    functions = {"watched": returned([(1, 1.0)], [(0, 3.0)]), "a": returned(10, 20)}
    found = call(functions, [0.0, 1.0], [4, 2])
    assert found.steps == []
    assert found.total.tolist() == [10.0, 20.0]


def test_two_functions_may_reward_the_same_step():
    functions = {"a": returned([(0, 1.0), (2, 2.0)]), "b": returned([(2, 10.0), (2, 1.0)])}
    found = call(functions, [1.0, 3.0], [3])
    assert found.steps == [{0: 1.0, 2: 2.0 + 3 * 11.0}]


def test_a_completion_without_a_step_has_reward_0():
    found = call({"s": returned([], [(0, 1.0)])}, [1.0], [3, 1])
    assert found.steps == [{}, {0: 1.0}]
    assert found.total.tolist() == [0.0, 1.0]


def test_without_step_rewards_there_are_no_steps():
    assert call({"a": returned(1, None), "b": returned(2, 3)}, [1, 1], [3, 1]).steps == []


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(3, 1.0)], "must end at 0 to 2, a token of the completion"),
        ([(-1, 1.0)], "must end at 0 to 2"),
        ([(0.5, 1.0)], "must end at 0 to 2"),
        ([(0, math.nan)], "must be a finite number"),
        ([(0, None)], "must be a finite number"),
        ([(0, "1")], "must be a finite number"),
        ([(0, 1.0, 2.0)], "must be a pair"),
        ([0, 1.0], "must be a pair"),
        ((0, 1.0), "must be a pair"),  # a step where a list of steps is due
    ],
)
def test_a_faulty_step_names_function_and_row(steps, words):
    with pytest.raises(UserError) as caught:
        call({"good": returned(0, 0), "bad": returned([(0, 1.0)], steps)}, [1, 1], [3, 3])
    assert "'bad' returned" in str(caught.value)
    assert "for row 1 of the batch" in str(caught.value)
    assert words in str(caught.value)


def test_a_completion_that_did_not_stop_has_the_penalty_as_its_only_step():
    steps = [{0: 1.0, 2: 3.0}, {1: 5.0}]
    assert penalise_steps(steps, [4, 1], [False, True], -1.0) == [{4: -1.0}, {1: 5.0}]
    assert penalise_steps(steps, [4, 1], [False, True], None) == steps


def test_tokens_are_trained_on_the_steps_that_end_at_or_after_them(tmp_path: Path):
    """Two prompts with two completions each, through the scorer of a run."""
    (tmp_path / "judge.py").write_text(FILE)
    names = [f"{tmp_path / 'judge.py'}:steps", f"{tmp_path / 'judge.py'}:stops"]
    config = tiny.train_config(max_prompt_length=8, max_completion_length=8)
    scorer = RewardFunctions.find(names, [1.0, 2.0], tiny.vocabulary(), config)
    examples = [Example(row, "p", [9], [], {}) for row in range(2)]
    ids = [[9, 5, 9, 6, 0], [6, 9, 5], [5, 5, 0], [6, 6, 0]]
    has_stop = [True, False, True, True]
    rollouts = Rollouts.of(ids, [[0.0] * len(row) for row in ids], has_stop)
    scorer.check_rows(examples)
    scored = scorer.score(examples, rollouts)

    # `stops` gives 2 * 0.5 at the last token of what stopped.
    assert scored.steps == [
        {1: 1.0, 3: 0.0, 4: 1.0},
        {0: 0.0, 2: 1.0},
        {0: 1.0, 1: 1.0, 2: 1.0},
        {0: 0.0, 1: 0.0, 2: 1.0},
    ]
    assert scored.total.tolist() == [[2.0, 1.0], [3.0, 1.0]]
    assert scored.by_function["steps"].tolist() == [[1.0, 1.0], [2.0, 0.0]]

    mask = right_pad(ids, 0)[1]  # (N*K, C)
    rewards = [list(steps.values()) for steps in scored.steps]
    ends = [list(steps) for steps in scored.steps]
    found = step_advantages(rewards, ends, mask, num_generations=2)
    # The first prompt's steps have 1 0 1 0 1: mean 3/5 and variance 0.3. Those of the second have
    # 1 1 1 0 0 1: mean 2/3 and variance 4/15.
    std_a, std_b = math.sqrt(0.3) + EPSILON, math.sqrt(4 / 15) + EPSILON
    right, wrong = 0.4 / std_a, -0.6 / std_a
    both = right + wrong + right
    expected = [
        [both, both, wrong + right, wrong + right, right],
        [wrong + right, right, right, 0, 0],
    ]
    right, wrong = (1 / 3) / std_b, -(2 / 3) / std_b
    expected += [
        [3 * right, 2 * right, right, 0, 0],
        [2 * wrong + right, wrong + right, right, 0, 0],
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)
    assert list(scored.by_function) == ["steps", "stops"]
