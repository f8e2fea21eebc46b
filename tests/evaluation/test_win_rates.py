"""Claim: win rates count what judges prefer, and their intervals cover the truth.

Targets: counts by hand, Wilson's interval of statsmodels, simulations with a known win rate; of the
win rate at equal length statsmodels' GLM and scipy's minimiser of the penalised likelihood. Pass@k
and maj@k are what enumeration of all draws of k samples, and votes counted by hand, give. About
`common.evaluation.win_rates`, `common.evaluation.pass_rates` and `common.evaluation.intervals`.
"""

from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit
from statsmodels.stats.proportion import proportion_confint

from common.evaluation.accuracy import Interval
from common.evaluation.intervals import mean_interval, mean_over_prompts, share_over_prompts
from common.evaluation.pass_rates import majority, pass_at, pass_rates
from common.evaluation.records import REFERENCE, Generation, PromptRecord, Verdict
from common.evaluation.summary import checks
from common.evaluation.win_rates import (
    MAX_INTERCEPT,
    PENALTY,
    all_win_rates,
    fit_logistic,
    length_controlled,
    verdict,
)
from common.report.tables import interval_cell
from common.rewards.functions import final_answers


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
    rates = {(rate.a, rate.b): rate for rate in all_win_rates(ANSWERS)}
    assert list(rates) == [("dpo", "sft"), ("sft", REFERENCE), ("dpo", REFERENCE)]
    rate = rates["dpo", "sft"]
    assert rate.judge == "rm"
    assert (rate.num_wins, rate.num_ties, rate.num_losses, rate.num_not_judged) == (2, 1, 1, 1)
    assert rate.win_rate == pytest.approx(2.5 / 4)
    assert rate.length_difference == pytest.approx((4 + 1 + 2 + 6) / 4)
    assert by_reward(ANSWERS, "sft", REFERENCE) == [None, 1, 0, 0.5, None]
    assert rates["sft", REFERENCE].num_not_judged == 2
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
    assert (anna.a, anna.b, anna.judge) == ("dpo", "sft", "anna")
    assert anna.win_rate == pytest.approx((1 + 0 + 0.75) / 3)
    assert (anna.num_wins, anna.num_ties, anna.num_losses, anna.num_not_judged) == (2, 0, 1, 1)
    assert (ben.judge, ben.num_ties, ben.num_not_judged) == ("ben", 1, 3)


def test_nothing_to_compare_is_no_comparison():
    assert all_win_rates([]) == []
    assert all_win_rates([row(0, None, sft=generation(1.0))]) == []
    silent = [row(0, None, sft=generation(None), dpo=generation(None))]
    assert all_win_rates(silent) == []


# ---- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "rows_each", "wins", "total"),
    [
        ([0.0] * 12, 1, 0, 12),
        ([1.0] * 12, 1, 12, 12),
        # Without ties all but one row: the variance is that of a sample, as wide as with n - 1.
        ([1.0] * 31 + [0.0] * 19, 1, 31 / 50 * 49, 49),
        # Where every prompt has the same share the prompts are counted: the deviations are 1e-16.
        ([1.0, 0.0, 0.0] * 20, 3, 20 / 3, 20),
    ],
)
def test_the_interval_is_wilson_s_with_student_s_quantile(values, rows_each, wins, total):
    prompts = [row // rows_each for row in range(len(values))]
    found = share_over_prompts(values, prompts)
    alpha = 2 * stats.norm.sf(stats.t.ppf(0.975, len(set(prompts)) - 1))
    expected = proportion_confint(wins, total, alpha=alpha, method="wilson")
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-9)


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


def test_one_prompt_has_no_interval():
    one = share_over_prompts([1.0, 0.0], ["a", "a"])
    assert (one.mean, one.low, one.high) == (0.5, None, None)
    assert interval_cell(one, 100, 1) == "50.0"
    for prompts in (["x"], ["x", "x"]):
        found = mean_over_prompts([1.0, 3.0][: len(prompts)], prompts)
        assert (found.low, found.high) == (None, None)


def coverage(generator: np.random.Generator, draw: Any, truth: float) -> tuple[float, float]:
    """Share of 1000 intervals that hold the truth, and their mean width."""
    held, width = 0, 0.0
    for _ in range(1000):
        values, prompts = draw(generator)
        found = share_over_prompts(values.tolist(), prompts.tolist())
        held += found.low <= truth <= found.high
        width += (found.high - found.low) / 1000
    return held / 1000, width


def test_ties_narrow_the_interval_and_it_covers_still():
    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return generator.choice([0, 0.5, 1], 150, p=[0.05, 0.8, 0.15]), np.arange(150)

    held, width = coverage(np.random.default_rng(0), draw, 0.55)
    assert 0.93 <= held <= 0.97
    low, high = proportion_confint(82.5, 150, alpha=0.05, method="wilson")
    assert width < 0.5 * (high - low)


def test_of_prompts_with_one_value_each_the_order_changes_nothing():
    values = [0.1 * n**2 for n in range(9)]
    found = mean_over_prompts(values, list("abcdefghi"))
    assert mean_over_prompts(values[::-1], list("abcdefghi")) == found
    assert (found.mean, found.low, found.high) == mean_interval(values)


def test_every_value_has_a_prompt():
    with pytest.raises(ValueError, match="shorter"):
        mean_over_prompts([1.0, 2.0], ["a"])


def test_what_was_not_measured_is_left_out_of_a_mean():
    found = mean_over_prompts([1.0, None, 3.0], ["x", "x", "y"])
    assert (found.mean, found.count) == (2.0, 2)
    assert mean_over_prompts([None], ["x"]) is None
    assert share_over_prompts([None], ["x"]) is None
    assert mean_over_prompts([None], ["x"], [3]) is None


def test_a_mean_over_tokens_weighs_long_completions_more():
    found = mean_over_prompts([1.0, 4.0, None], ["x", "y", "z"], [30, 10, 99])
    assert found.mean == pytest.approx((30 * 1 + 10 * 4) / 40)
    assert (found.low, found.high) == (1.0, 4.0)
    one_prompt = mean_over_prompts([1.0, 4.0], ["x", "x"], [30, 10])
    assert one_prompt == Interval(pytest.approx(1.75), None, None, 2)


def test_prompts_that_repeat_are_drawn_together():
    values = np.random.default_rng(2).normal(size=50)
    alone = mean_over_prompts(values.tolist(), list(range(50)))
    twice = mean_over_prompts(np.tile(values, 2).tolist(), 2 * list(range(50)))
    assert twice.mean == pytest.approx(alone.mean)
    width = [own.high - own.low for own in (alone, twice)]
    assert width[1] == pytest.approx(width[0], rel=0.05)  # two copies tell no more than one


# ---- at equal length -----------------------------------------------------------------------------

THETA, PHI = 0.4, 1.2
EQUAL = 1 / (1 + np.exp(-THETA))  # 59.9%


def simulate(
    generator: np.random.Generator, number: int, mean: float = 6.0
) -> tuple[np.ndarray, np.ndarray]:
    """Verdicts and length differences: a is longer by 6 tokens on average, and wins by that too."""
    differences = np.round(generator.normal(mean, 8, number))
    chances = 1 / (1 + np.exp(-THETA - PHI * np.tanh(differences / differences.std())))
    return (generator.random(number) < chances).astype(float), differences


def glm(wins: np.ndarray, differences: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    covariate = np.tanh(differences / differences.std())
    design = sm.add_constant(covariate)
    return sm.GLM(wins, design, family=sm.families.Binomial(), freq_weights=weights).fit().params


def test_the_estimate_is_that_of_statsmodels():
    wins, differences = simulate(np.random.default_rng(0), 3000)
    wins[:300] = 0.5  # ties and probabilities are allowed
    found = length_controlled(wins, differences, range(3000))
    theta, phi = glm(wins, differences)
    assert found.win_rate == pytest.approx(1 / (1 + np.exp(-theta)), abs=1e-5)
    assert found.length_effect == pytest.approx(phi, abs=1e-3)
    assert wins.mean() - found.win_rate > 0.08  # and is another one than the plain win rate


def test_every_weighting_is_fitted_as_alone():
    generator = np.random.default_rng(1)
    wins, differences = simulate(generator, 400)
    weights = generator.integers(0, 4, (5, 400))
    covariate = np.tanh(differences / differences.std())
    fitted = fit_logistic(covariate, wins, weights)
    for row, found in zip(weights, fitted, strict=True):
        assert found == pytest.approx(glm(wins, differences, row), abs=2e-3)  # the penalty
        assert found == pytest.approx(penalised(covariate, wins, row), abs=1e-5)
    again = fit_logistic(covariate, wins, weights, start=np.array([[2.0, -3.0]]))
    assert again == pytest.approx(fitted, abs=1e-7)


def largest_gradient(covariate: Any, wins: Any, weights: Any, fitted: Any) -> float:
    """How far a fit is from its maximum: the larger gradient per weight, one at the limit aside."""
    residuals = weights * (wins - expit(fitted[0] + fitted[1] * covariate))
    by_intercept, by_slope = residuals.sum(), residuals @ covariate - PENALTY * fitted[1]
    if abs(fitted[0]) == MAX_INTERCEPT:  # beyond which it would go on
        by_intercept = min(0.0, by_intercept * np.sign(fitted[0]))
    return float(max(abs(by_intercept), abs(by_slope)) / weights.sum())


def test_verdicts_that_the_length_decides_have_a_maximum():
    """One side wins if it is longer by some tokens: the intercept grows up to its limit."""
    generator = np.random.default_rng(0)
    at_limit = 0
    for _ in range(40):
        covariate = np.tanh(generator.normal(size=1000))
        wins = (covariate > generator.normal() / 2).astype(float)
        weights = generator.multinomial(1000, np.full(1000, 1e-3), size=4)
        for row, fitted in zip(weights, fit_logistic(covariate, wins, weights), strict=True):
            assert largest_gradient(covariate, wins, row, fitted) < 1e-7
            at_limit += abs(fitted[0]) == MAX_INTERCEPT
    assert at_limit > 20


def test_the_numbers_of_an_evaluation_are_those_of_every_version():
    """Resamples, seed, penalty and limit decide the digits of what has been published."""
    assert mean_interval([n**2 for n in range(6)]) == pytest.approx((55 / 6, 2.6625, 50 / 3))
    differences = [7 * n % 41 - 18 for n in range(60)]
    verdicts = [float(n * n % 5 in (0, 1) or differences[n] > 9) for n in range(60)]
    found = asdict(length_controlled(verdicts, differences, range(60)))
    expected = [0.7366986737833547, 0.6076903418502052, 0.8637122721213818, 1.343408367502392]
    assert [*found.values()] == pytest.approx(expected, rel=1e-7)
    one_win = length_controlled([1.0, *[0.0] * 19], differences[:20], range(20))
    assert one_win.low == pytest.approx(expit(-20.0))  # of resamples without it


def test_every_start_leads_to_the_maximum():
    generator = np.random.default_rng(0)
    for _ in range(200):
        size = generator.integers(3, 12)
        covariate = np.tanh(generator.normal(size=size) * generator.choice([0.1, 1, 5]))
        wins = generator.choice([0, 0.5, 1], size)
        weights = 100.0 * generator.integers(0, 4, (1, size)) + 1
        start = generator.uniform(-10, 10, (1, 2))
        (fitted,) = fit_logistic(covariate, wins, weights, start)
        assert largest_gradient(covariate, wins, weights[0], fitted) < 1e-7


def penalised(covariate: np.ndarray, wins: np.ndarray, weights: np.ndarray) -> np.ndarray:
    def loss(coefficients: np.ndarray) -> float:
        eta = coefficients[0] + coefficients[1] * covariate
        loglik = wins * eta - np.logaddexp(0, eta)
        return float(-(weights * loglik).sum() + PENALTY / 2 * coefficients[1] ** 2)

    return minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-8}).x


@pytest.mark.parametrize("sign", [1, -1])
def test_lengths_that_tell_all_verdicts_apart_leave_it_finite(sign):
    """The likelihood has no maximum there."""
    differences = sign * np.arange(-10.0, 12.0)
    wins = (differences > 0) + 0.5 * (differences == 0)
    found = length_controlled(wins, differences, range(wins.size))
    covariate = np.tanh(differences / differences.std())
    theta, phi = penalised(covariate, wins, np.ones(wins.size))
    assert phi > 3
    assert found.length_effect == pytest.approx(phi, rel=1e-4)
    assert found.win_rate == pytest.approx(1 / (1 + np.exp(-theta)), abs=1e-4)
    assert 0 <= found.low <= found.win_rate <= found.high <= 1


def test_who_always_wins_has_no_win_rate_at_equal_length():
    """Every resample says so too: an interval of width 0 would promise what nobody knows."""
    for share in (0.0, 0.5, 1.0):
        assert length_controlled(np.full(30, share), np.arange(30.0), range(30)) is None


def test_few_prompts_have_no_interval():
    wins, differences = simulate(np.random.default_rng(4), 90)
    assert length_controlled(wins, differences, [i % 9 for i in range(90)]) is None
    assert length_controlled(wins, differences, [i % 10 for i in range(90)]) is not None


def test_where_lengths_do_not_differ_nothing_is_corrected():
    wins = np.array([1.0, 1.0, 0.0, 0.5] * 3)
    assert length_controlled(wins, np.zeros(12), range(12)).win_rate == pytest.approx(2.5 / 4)
    assert length_controlled(wins, np.full(12, 3.0), range(12)) is None  # nor can be


def test_the_interval_covers_the_win_rate_at_equal_length_and_not_the_plain_one():
    generator = np.random.default_rng(3)
    covered, plain = 0, 0
    for _ in range(40):
        wins, differences = simulate(generator, 250)
        found = length_controlled(wins, differences, range(250))
        covered += found.low <= EQUAL <= found.high
        plain += found.low <= wins.mean() <= found.high
    assert 0.86 <= covered / 40 <= 1.0  # 95% within three standard errors
    assert plain / 40 < 0.3


def test_prompts_that_are_alike_widen_the_interval():
    """Every verdict four times: as wide as with a quarter of the rows if drawn together."""
    wins, differences = simulate(np.random.default_rng(4), 100)
    alone = length_controlled(wins, differences, range(100))
    four = (np.repeat(wins, 4), np.repeat(differences, 4))
    together = length_controlled(*four, np.repeat(np.arange(100), 4))
    apart = length_controlled(*four, range(400))
    width = {
        name: own.high - own.low
        for name, own in (("alone", alone), ("together", together), ("apart", apart))
    }
    assert width["together"] == pytest.approx(width["alone"], rel=0.02)
    assert width["apart"] == pytest.approx(width["alone"] / 2, rel=0.15)


# ---- pass@k and maj@k ----------------------------------------------------------------------------


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


def test_an_answer_belongs_to_a_sample():
    with pytest.raises(ValueError, match="longer|shorter"):
        majority([1, 0, 0], ["7", "7"])
    with pytest.raises(ValueError, match="longer|shorter"):
        pass_rates([[1, 0], [0, 1]], [["7", "7"]], ["a", "b"])


def test_rates_are_means_over_prompts_with_their_intervals():
    rewards = [[1, 0, 0], [1, 1, 1], [0, 0, 0], [None, 1, 1]]
    answers = [["1", "2", "2"], ["4", "4", "4"], ["5", None, None], ["6", "6", "6"]]
    prompts = ["a", "b", "a", "c"]
    found = pass_rates(rewards, answers, prompts)
    assert {name: own.mean for name, own in found.items()} == pytest.approx(
        {"pass@1": 4 / 9, "pass@2": (2 / 3 + 1) / 3, "pass@3": 2 / 3, "maj@3": 1 / 3}
    )
    assert found["pass@1"] == share_over_prompts([1 / 3, 1.0, 0.0, None], prompts)
    assert {own.count for own in found.values()} == {3}  # the check does not apply to the last
    assert list(pass_rates(rewards, None, prompts)) == ["pass@1", "pass@2", "pass@3"]
    assert list(pass_rates([[1], [0]], [["1"], ["2"]], ["a", "b"])) == ["pass@1"]
    of_one = pass_rates([[1, 0]], [["7", "3"]], ["a"])
    assert {name: own.mean for name, own in of_one.items()} == {
        "pass@1": 0.5,
        "pass@2": 1.0,
        "maj@2": 0.5,
    }


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
