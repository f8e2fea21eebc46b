"""Claim: pass@k and maj@k are what drawing k of the samples, and counting their answers, gives.

Targets: enumeration of all draws, and votes counted by hand.
"""

from itertools import combinations

import pytest

from common.evaluation.intervals import share_over_prompts
from common.evaluation.pass_rates import majority, pass_at, pass_rates
from common.evaluation.records import Generation, PromptRecord
from common.evaluation.summary import checks
from common.rewards.functions import final_answers


@pytest.mark.parametrize("num_samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_all_draws_with_a_sample_that_passes(num_samples):
    for num_passed in range(num_samples + 1):
        samples = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            draws = [any(drawn) for drawn in combinations(samples, k)]
            assert pass_at(k, num_samples, num_passed) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["7", "7", "3"], [1, 1, 0], 1),
        (["7", "3", "3"], [1, 0, 0], 0),
        (["7", "3", None], [1, 0, 0], 0.5),  # a tie
        (["7", "3", "5", "5", "7"], [1, 0, 0, 0, 0], 0.5),  # right where any sample with it passed
        (["7", None, None], [1, 0, 0], 1),  # no answer, no vote
        ([None, None], [0, 0], 0),
    ],
)
def test_the_answer_of_most_samples_is_right_or_not(answers, rewards, expected):
    assert majority(rewards, answers) == expected


def test_rates_are_means_over_prompts_with_their_intervals():
    rewards = [[1, 0, 0], [1, 1, 1], [0, 0, 0], [None, 1, 1]]
    answers = [["1", "2", "2"], ["4", "4", "4"], ["5", None, None], ["6", "6", "6"]]
    prompts = ["a", "b", "a", "c"]
    found = pass_rates(rewards, answers, prompts)
    assert {name: own["mean"] for name, own in found.items()} == pytest.approx(
        {"pass@1": 4 / 9, "pass@2": (2 / 3 + 1) / 3, "pass@3": 2 / 3, "maj@3": 1 / 3}
    )
    assert found["pass@1"] == share_over_prompts([1 / 3, 1.0, 0.0, None], prompts)
    assert {own["count"] for own in found.values()} == {3}  # the check does not apply to the last
    assert list(pass_rates(rewards, None, prompts)) == ["pass@1", "pass@2", "pass@3"]
    assert list(pass_rates([[1], [0]], [["1"], ["2"]], ["a", "b"])) == ["pass@1"]


def test_a_check_says_nothing_but_0_and_1_of_any_completion():
    def one(**rewards):
        return Generation("text", 1, True, rewards)

    first = one(check=1.0, score=0.0, none=None)
    second = one(check=None, score=1.0, none=None)
    rows = [PromptRecord(0, "p", None, {"a": first}), PromptRecord(1, "q", None, {"a": second})]
    assert checks(rows) == ["check", "score"]
    further = PromptRecord(1, "q", None, {"a": second}, further={"a": [one(check=0.0, score=0.5)]})
    assert checks([rows[0], further]) == ["check"]


def test_equal_numbers_are_equal_answers_of_gsm8k():
    texts = ["so\n#### 1,000", "#### $1000.00", "#### 2\n#### 18.50", "#### -0", "18", "#### none"]
    assert final_answers(texts) == ["1000", "1000", "18.5", "0", None, None]
    assert final_answers([[{"role": "assistant", "content": "#### 7.00"}]]) == ["7"]
    long = ["#### " + "9" * 40, "#### " + "9" * 39 + "8"]
    assert final_answers(long) == ["9" * 40, "9" * 39 + "8"]
