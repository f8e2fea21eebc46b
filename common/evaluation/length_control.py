"""Length-controlled win rate: what the win rate would be if both completions were equally long.

Judges, human and model, prefer longer answers. As in AlpacaEval 2 (Dubois et al. 2024, "Length-
controlled AlpacaEval") the verdicts are explained by a logistic regression on the length,

    P(a wins) = sigma(theta + phi * tanh(d / s)),   d = length of a - length of b,

with s the standard deviation of d over the prompts; the length-controlled win rate is the
prediction at d = 0, sigma(theta). Differences from AlpacaEval: d is in tokens (there characters);
there is no term for a prompt's difficulty, which needs many systems to be estimated; and phi is not
shrunk (there by cross-validation, and towards a baseline whose lengths were gamed), but for a
penalty that decides only what the likelihood leaves open.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.evaluation.intervals import cluster_numbers, percentile_interval, resamples
from common.evaluation.paired_statistics import MIN_PROMPTS

Floats = NDArray[np.float64]

# Of phi^2 / 2: a normal prior with standard deviation 10. Where lengths tell all verdicts apart phi
# stays finite; else it moves phi by about 0.01 phi times the variance of its estimate.
PENALTY = 0.01
MAX_INTERCEPT = 20.0  # where all verdicts are alike theta has no maximum: sigma(20) = 1 - 2e-9
MAX_STEPS = 500
TOLERANCE = 1e-9
NUMBERS_AT_ONCE = 2**21  # resamples times prompts


class LengthControlled(NamedTuple):
    """A length-controlled win rate with its 95% interval."""

    win_rate: float
    low: float
    high: float
    length_effect: float  # phi: log-odds of a clearly longer completion, positive = longer wins


def length_controlled(
    verdicts: ArrayLike, length_differences: ArrayLike, clusters: Sequence[Hashable]
) -> LengthControlled | None:
    """The win rate at equal length, with a percentile bootstrap interval over clusters.

    Args:
        verdicts: (N,) probability that a wins, or 1, 0.5 (a tie) and 0.
        length_differences: (N,) tokens of a minus tokens of b.
        clusters: N keys, equal for comparisons that resemble each other: the prompts.

    Returns:
        None where all differences are the same and not 0: nothing then tells length from quality.
        None too where all verdicts are alike, or there are fewer than `MIN_PROMPTS` clusters: every
        resample would say the same. The scale s is that of all comparisons in every resample.
    """
    wins, differences = np.asarray(verdicts, float), np.asarray(length_differences, float)
    if differences.min() == differences.max() != 0 or wins.min() == wins.max():
        return None
    if len(set(clusters)) < MIN_PROMPTS:
        return None
    spread = differences.std() or 1.0
    covariate = np.tanh(differences / spread)
    fitted = fit_logistic(covariate, wins, np.ones((1, wins.size)))  # (1, 2)
    numbers = cluster_numbers(clusters)
    weights = list(resamples(int(numbers.max()) + 1))  # (R, G)
    at_once = max(1, NUMBERS_AT_ONCE // wins.size)
    thetas = np.concatenate(
        [
            fit_logistic(covariate, wins, np.stack(part)[:, numbers], start=fitted)[:, 0]
            for part in (weights[i : i + at_once] for i in range(0, len(weights), at_once))
        ]
    )
    win_rate = float(sigmoid(fitted[0, 0]))
    interval = percentile_interval(sigmoid(thetas), win_rate)
    return LengthControlled(win_rate, *interval, float(fitted[0, 1]))


def fit_logistic(
    covariate: Floats, outcomes: Floats, weights: NDArray, start: Floats | None = None
) -> Floats:
    """Logistic regressions on an intercept and a covariate, for R weightings of the observations.

    Newton's method, which is iteratively reweighted least squares (McCullagh and Nelder 1989,
    section 2.5), on the log-likelihood less PENALTY / 2 times the slope squared. A step is
    shortened until no linear predictor moves by more than 1/2: up to there the second derivative
    grows by less than a factor e^(1/2) (Bach 2010, lemma 1), so that every step climbs.

    Args:
        covariate: (N,) within [-1, 1].
        outcomes: (N,) within [0, 1].
        weights: (R, N), not negative, each row with a positive sum.
        start: (1, 2) or (R, 2) first guess.

    Returns:
        (R, 2) intercepts, within +-MAX_INTERCEPT, and slopes.

    Raises:
        RuntimeError: no maximum was found.
    """
    guess = np.zeros((1, 2)) if start is None else start
    fitted: Floats = np.repeat(guess, len(weights) // len(guess), axis=0)  # (R, 2)
    for _ in range(MAX_STEPS):
        chances = sigmoid(fitted[:, :1] + fitted[:, 1:] * covariate)  # (R, N)
        residuals = weights * (outcomes - chances)
        gradient = np.stack([residuals.sum(1), residuals @ covariate], 1)  # (R, 2)
        gradient[:, 1] -= PENALTY * fitted[:, 1]
        curvature = weights * np.maximum(chances * (1 - chances), 1e-12)
        both, slope = curvature @ covariate, curvature @ covariate**2 + PENALTY
        intercept = curvature.sum(1)
        determinant = intercept * slope - both**2  # positive: Cauchy-Schwarz, and the penalty
        step = np.stack(
            [
                (slope * gradient[:, 0] - both * gradient[:, 1]) / determinant,
                (intercept * gradient[:, 1] - both * gradient[:, 0]) / determinant,
            ],
            1,
        )
        reach = np.abs(step).sum(1, keepdims=True)  # at least what a linear predictor moves by
        moved = fitted + step * np.minimum(1.0, 0.5 / np.maximum(reach, 1e-300))
        moved[:, 0] = moved[:, 0].clip(-MAX_INTERCEPT, MAX_INTERCEPT)
        change = np.abs(moved - fitted).max()
        fitted = moved
        if change < TOLERANCE:
            return fitted
    raise RuntimeError(f"the regression of verdicts on length still moves after {MAX_STEPS} steps.")


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * np.asarray(x))))
