"""Claim: win rates count what judges prefer, and their intervals cover the truth.

Targets: counts by hand, Wilson's interval of statsmodels, simulations with a known win rate.
"""

from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from common.evaluation.intervals import mean_over_prompts, share_over_prompts
from common.evaluation.records import REFERENCE, Generation, PromptRecord, Verdict
from common.evaluation.win_rates import all_win_rates, verdict
from common.report.tables import interval_cell


def generation(reward: float | None, text: str = "", tokens: int = 3, **rest: Any) -> Generation:
    return Generation(text or f"text {reward} {tokens}", tokens, True, {"rm": reward}, **rest)


def row(
    number: int, reference: Generation | None, *, verdicts: Any = (), **own: Any
) -> PromptRecord:
    return PromptRecord(number, f"prompt {number}", reference, own, list(verdicts))


ANSWERS = [
    row(0, None, sft=generation(1.0), dpo=generation(2.0, tokens=7)),
    row(1, generation(0.5), sft=generation(1.0), dpo=generation(1.0, "as good", tokens=4)),
    row(2, generation(9.0), sft=generation(3.0), dpo=generation(2.5, tokens=5)),
    row(3, generation(0.0), sft=generation(0.0), dpo=generation(None)),
    row(4, generation(None), sft=generation(-1.0), dpo=generation(4.0, tokens=9)),
]


def by_reward(answers: list[PromptRecord], a: str, b: str) -> list[float | None]:
    return [verdict(own, a, b, "rm") for own in answers]


def test_wins_ties_and_losses_by_hand():
    rates = {(rate["a"], rate["b"]): rate for rate in all_win_rates(ANSWERS)}
    assert list(rates) == [("dpo", "sft"), ("sft", REFERENCE), ("dpo", REFERENCE)]
    rate = rates["dpo", "sft"]
    assert rate["judge"] == "rm"
    counts = [rate[f"num_{key}"] for key in ("wins", "ties", "losses", "not_judged")]
    assert counts == [2, 1, 1, 1]
    assert rate["win_rate"] == pytest.approx(2.5 / 4)
    assert rate["length_difference"] == pytest.approx((4 + 1 + 2 + 6) / 4)
    assert by_reward(ANSWERS, "sft", REFERENCE) == [None, 1, 0, 0.5, None]
    assert rates["sft", REFERENCE]["num_not_judged"] == 2
    assert by_reward(ANSWERS, "dpo", REFERENCE) == [None, 1, 0, None, None]


def test_the_same_text_is_a_tie_whatever_rounding_says():
    """A reward model's score of a text depends in its last digits on the rest of the batch."""
    pair = {"sft": generation(1.0, "same"), "dpo": generation(1.0 + 1e-6, "same")}
    assert by_reward([row(0, None, **pair)], "dpo", "sft") == [0.5]
    cut = Generation("same", 3, False, {"rm": 0.0})
    assert by_reward([row(0, None, sft=cut, dpo=pair["dpo"])], "dpo", "sft") == [1]


def test_given_verdicts_are_read_from_either_side():
    own = {"sft": generation(None), "dpo": generation(None, tokens=4)}
    answers = [
        row(0, None, **own, verdicts=[Verdict("dpo", "sft", "anna", 1.0)]),
        row(1, None, **own, verdicts=[Verdict("sft", "dpo", "anna", 1.0)]),
        row(2, None, **own, verdicts=[Verdict("sft", "dpo", "anna", 0.25)]),
        row(3, None, **own, verdicts=[Verdict("sft", "dpo", "ben", 0.5)]),
    ]
    anna, ben = all_win_rates(answers)
    assert (anna["a"], anna["b"], anna["judge"]) == ("dpo", "sft", "anna")
    assert anna["win_rate"] == pytest.approx((1 + 0 + 0.75) / 3)
    assert [anna[f"num_{k}"] for k in ("wins", "ties", "losses", "not_judged")] == [2, 0, 1, 1]
    assert (ben["judge"], ben["num_ties"], ben["num_not_judged"]) == ("ben", 1, 3)


def test_nothing_to_compare_is_no_comparison():
    assert all_win_rates([]) == []
    assert all_win_rates([row(0, None, sft=generation(1.0))]) == []
    silent = [row(0, None, sft=generation(None), dpo=generation(None))]
    assert all_win_rates(silent) == []


# ---- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("wins", "total"), [(0, 12), (12, 12)])
def test_a_share_of_0_or_1_has_wilson_s_interval_with_student_s_quantile(wins, total):
    found = share_over_prompts([1.0] * wins + [0.0] * (total - wins), range(total))
    expected = proportion_confint(wins, total, alpha=normal_level(total), method="wilson")
    assert (found["low"], found["high"]) == pytest.approx(expected, abs=1e-9)


def normal_level(num_prompts: int) -> float:
    """The level at which a normal quantile is as large as Student's of the prompts at 5%."""
    return 2 * stats.norm.sf(stats.t.ppf(0.975, num_prompts - 1))


def test_without_ties_the_interval_is_wilson_s_but_for_one_row():
    """The variance is that of a sample: as wide as with n - 1."""
    found = share_over_prompts([1.0] * 31 + [0.0] * 19, range(50))
    expected = proportion_confint(31 / 50 * 49, 49, alpha=normal_level(50), method="wilson")
    assert (found["low"], found["high"]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("num_prompts", [2, 3, 5, 10])
@pytest.mark.parametrize("rows_each", [1, 40])
def test_of_a_few_prompts_the_interval_covers_still(num_prompts, rows_each):
    """The normal quantile covered 72% at 2 prompts, 82% at 3, 88% at 5 and 92 to 94% at 10."""

    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        prompts = np.repeat(np.arange(num_prompts), rows_each)
        shares = generator.beta(2, 2, num_prompts)[prompts]
        if rows_each == 1:  # a judge's probability
            return shares, prompts
        return (generator.random(prompts.size) < shares).astype(float), prompts

    held, width = coverage(np.random.default_rng(0), draw, 0.5)
    assert held >= 0.93  # 0.95 less three standard errors
    assert width < 1


def test_where_every_prompt_has_the_same_share_the_prompts_are_counted():
    wins = [1.0, 0.0, 0.0] * 20  # a third each: the deviations are some 1e-16
    found = share_over_prompts(wins, [prompt for prompt in range(20) for _ in range(3)])
    expected = proportion_confint(20 / 3, 20, alpha=normal_level(20), method="wilson")
    assert (found["low"], found["high"]) == pytest.approx(expected, abs=1e-9)
    one = share_over_prompts([1.0, 0.0], ["a", "a"])
    assert (one["mean"], one["low"], one["high"]) == (0.5, None, None)
    assert interval_cell(one, 100, 1) == "50.0"


def coverage(generator: np.random.Generator, draw: Any, truth: float) -> tuple[float, float]:
    """Share of 1000 intervals that hold the truth, and their mean width."""
    held, width = 0, 0.0
    for _ in range(1000):
        values, prompts = draw(generator)
        found = share_over_prompts(values.tolist(), prompts.tolist())
        held += found["low"] <= truth <= found["high"]
        width += (found["high"] - found["low"]) / 1000
    return held / 1000, width


def test_ties_narrow_the_interval_and_it_covers_still():
    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return generator.choice([0, 0.5, 1], 150, p=[0.05, 0.8, 0.15]), np.arange(150)

    held, width = coverage(np.random.default_rng(0), draw, 0.55)
    assert 0.93 <= held <= 0.97
    low, high = proportion_confint(82.5, 150, alpha=0.05, method="wilson")
    assert width < 0.5 * (high - low)


def test_rows_of_a_prompt_widen_the_interval_and_it_covers_still():
    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        prompts = np.repeat(np.arange(60), 4)
        share = generator.choice([0.4, 0.95], 60)[prompts]
        return (generator.random(240) < share).astype(float), prompts

    held, width = coverage(np.random.default_rng(1), draw, 0.675)
    assert 0.93 <= held <= 0.97
    low, high = proportion_confint(162, 240, alpha=0.05, method="wilson")
    assert width > 1.2 * (high - low)


def test_what_was_not_measured_is_left_out_of_a_mean():
    found = mean_over_prompts([1.0, None, 3.0], ["x", "x", "y"])
    assert (found["mean"], found["count"]) == (2.0, 2)
    assert mean_over_prompts([None], ["x"]) is None
    assert share_over_prompts([None], ["x"]) is None
    assert mean_over_prompts([None], ["x"], [3]) is None


def test_a_mean_over_tokens_weighs_long_completions_more():
    found = mean_over_prompts([1.0, 4.0, None], ["x", "y", "z"], [30, 10, 99])
    assert found["mean"] == pytest.approx((30 * 1 + 10 * 4) / 40)
    assert (found["low"], found["high"]) == (1.0, 4.0)
    one_prompt = mean_over_prompts([1.0, 4.0], ["x", "x"], [30, 10])
    assert one_prompt == {"mean": pytest.approx(1.75), "low": None, "high": None, "count": 2}


def test_one_prompt_has_no_interval_of_a_mean():
    for prompts in (["x"], ["x", "x"]):
        found = mean_over_prompts([1.0, 3.0][: len(prompts)], prompts)
        assert (found["low"], found["high"]) == (None, None)


def test_prompts_that_repeat_are_drawn_together():
    values = np.random.default_rng(2).normal(size=50)
    alone = mean_over_prompts(values.tolist(), list(range(50)))
    twice = mean_over_prompts(np.tile(values, 2).tolist(), 2 * list(range(50)))
    assert twice["mean"] == pytest.approx(alone["mean"])
    width = [own["high"] - own["low"] for own in (alone, twice)]
    assert width[1] == pytest.approx(width[0], rel=0.05)  # two copies tell no more than one
