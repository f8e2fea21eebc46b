"""Claim: the win rate at equal length is that of a logistic regression, and covers the truth.

Targets: statsmodels' GLM, scipy's minimiser of the penalised likelihood, simulations whose win rate
at equal length is known.
"""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.optimize import minimize

from common.evaluation.win_rates import PENALTY, fit_logistic, length_controlled

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
    assert found["win_rate"] == pytest.approx(1 / (1 + np.exp(-theta)), abs=1e-5)
    assert found["length_effect"] == pytest.approx(phi, abs=1e-3)
    assert wins.mean() - found["win_rate"] > 0.08  # and is another one than the plain win rate


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
    assert found["length_effect"] == pytest.approx(phi, rel=1e-4)
    assert found["win_rate"] == pytest.approx(1 / (1 + np.exp(-theta)), abs=1e-4)
    assert 0 <= found["low"] <= found["win_rate"] <= found["high"] <= 1


def test_who_always_wins_has_no_win_rate_at_equal_length():
    """Every resample says so too: an interval of width 0 would promise what nobody knows."""
    for verdict in (0.0, 0.5, 1.0):
        assert length_controlled(np.full(30, verdict), np.arange(30.0), range(30)) is None


def test_few_prompts_have_no_interval():
    wins, differences = simulate(np.random.default_rng(4), 90)
    assert length_controlled(wins, differences, [i % 9 for i in range(90)]) is None
    assert length_controlled(wins, differences, [i % 10 for i in range(90)]) is not None


def test_where_lengths_do_not_differ_nothing_is_corrected():
    wins = np.array([1.0, 1.0, 0.0, 0.5] * 3)
    assert length_controlled(wins, np.zeros(12), range(12))["win_rate"] == pytest.approx(2.5 / 4)
    assert length_controlled(wins, np.full(12, 3.0), range(12)) is None  # nor can be


def test_the_interval_covers_the_win_rate_at_equal_length_and_not_the_plain_one():
    generator = np.random.default_rng(3)
    covered, plain = 0, 0
    for _ in range(40):
        wins, differences = simulate(generator, 250)
        found = length_controlled(wins, differences, range(250))
        covered += found["low"] <= EQUAL <= found["high"]
        plain += found["low"] <= wins.mean() <= found["high"]
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
        name: own["high"] - own["low"]
        for name, own in (("alone", alone), ("together", together), ("apart", apart))
    }
    assert width["together"] == pytest.approx(width["alone"], rel=0.02)
    assert width["apart"] == pytest.approx(width["alone"] / 2, rel=0.15)
