"""Win rates: how often a judge prefers the completion of one system to that of another.

A judge is a reward (of a reward model or a reward function: the higher one wins, equal ones tie),
or whoever gave verdicts on two completions (a Python function, a person, a model outside). A tie
counts one half. Every comparison is a function of `completions.jsonl`.

Judges, human and model, prefer longer answers. As in AlpacaEval 2 (Dubois et al. 2024, "Length-
controlled AlpacaEval") the verdicts are therefore also explained by a logistic regression,

    P(a wins) = sigma(theta + phi * tanh(d / s)),   d = length of a - length of b,

with s the standard deviation of d over the prompts; the length-controlled win rate is the
prediction at d = 0, sigma(theta). Differences from AlpacaEval: d is in tokens (there characters);
there is no term for a prompt's difficulty, which needs many systems to be estimated; and phi is not
shrunk (there by cross-validation, and towards a baseline whose lengths were gamed), but for a
penalty that decides only what the likelihood leaves open.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.evaluation import intervals
from common.evaluation.accuracy import Floats
from common.evaluation.records import PromptRecord, system_names
from common.evaluation.results import LengthControlled, WinRate
from common.losses import wins as wins_of

# Of phi^2 / 2: a normal prior with standard deviation 10. Where lengths separate all verdicts phi
# stays finite; else it moves phi by about 0.01 phi times the variance of its estimate.
PENALTY = 0.01
MAX_INTERCEPT = 20.0  # where all verdicts are alike theta has no maximum: sigma(20) = 1 - 2e-9
MAX_STEPS = 500
TOLERANCE = 1e-9
NUMBERS_AT_ONCE = 2**21  # resamples times prompts


def all_win_rates(records: Sequence[PromptRecord]) -> list[WinRate]:
    """Every system against every earlier one and against the rows' own completions, by every judge.

    A judge that compared nothing of two systems is left out.
    """
    rates = []
    generations = [generation for record in records for generation in record.systems.values()]
    rewards = [name for generation in generations for name in generation.rewards]
    comparing = [verdict.judge for record in records for verdict in record.verdicts]
    judges = dict.fromkeys([*rewards, *comparing])
    for first, second in combinations(system_names(records), 2):
        # a is the later of two systems, and never the reference completion.
        a, b = (second, first) if second in records[0].systems else (first, second)
        rates += [win_rate(records, a, b, judge) for judge in judges]
    return [rate for rate in rates if rate]


def win_rate(records: Sequence[PromptRecord], a: str, b: str, judge: str) -> WinRate | None:
    """Win rate of one system against another on N prompts by a judge; None without verdicts."""
    rows = [
        (record.prompt, wins, pair[0].num_tokens - pair[1].num_tokens)
        for record in records
        if (pair := record.pair(a, b)) and (wins := verdict(record, a, b, judge)) is not None
    ]
    prompts = [prompt for prompt, _, _ in rows]
    verdicts = [wins for _, wins, _ in rows]
    differences = [difference for _, _, difference in rows]
    share = intervals.share_over_prompts(verdicts, prompts)
    if share is None:
        return None
    return WinRate(
        a,
        b,
        judge,
        win_rate=share.mean,
        low=share.low,
        high=share.high,
        num_wins=sum(wins > 0.5 for wins in verdicts),
        num_ties=sum(wins == 0.5 for wins in verdicts),
        num_losses=sum(wins < 0.5 for wins in verdicts),
        num_not_judged=len(records) - len(rows),
        length_difference=sum(differences) / len(differences),
        length_controlled=length_controlled(verdicts, differences, prompts),
    )


def verdict(record: PromptRecord, a: str, b: str, judge: str) -> float | None:
    """The probability that a wins by a judge; by rewards 1, 0 or in a tie 0.5.

    Equal completions tie: their rewards may differ in rounding, which depends on the rest of the
    batch (5% of such pairs did on the embedded task). None without both completions or a verdict.
    """
    for verdict in record.verdicts:
        if verdict.judge == judge and {verdict.a, verdict.b} == {a, b}:
            return verdict.a_wins if verdict.a == a else 1 - verdict.a_wins
    if (pair := record.pair(a, b)) is None:
        return None
    first, second = pair
    rewards = (first.rewards.get(judge), second.rewards.get(judge))
    if None in rewards:
        return None
    if (first.completion, first.stopped) == (second.completion, second.stopped):
        return 0.5
    return float(wins_of(rewards[0], rewards[1]))


# ---- at equal length -----------------------------------------------------------------------------


def length_controlled(
    verdicts: ArrayLike,  # (N,) probability that a wins, or 1, 0.5 (a tie) and 0
    length_differences: ArrayLike,  # (N,) tokens of a minus tokens of b
    clusters: Sequence[Hashable],  # N keys: the prompts
) -> LengthControlled | None:
    """Win rate at equal length, with a percentile bootstrap interval over clusters.

    None if all differences are equal and not 0: then length and quality cannot be separated. None
    too if all verdicts are equal, or there are fewer than `MIN_PROMPTS` clusters. Every resample
    has the scale s of all comparisons.
    """
    from scipy.special import expit

    wins, differences = np.asarray(verdicts, float), np.asarray(length_differences, float)
    if differences.min() == differences.max() != 0 or wins.min() == wins.max():
        return None
    numbers = intervals.cluster_numbers(clusters)
    num_clusters = int(numbers.max()) + 1
    if num_clusters < intervals.MIN_PROMPTS:
        return None
    covariate = np.tanh(differences / (differences.std() or 1.0))
    fitted = fit_logistic(covariate, wins, np.ones((1, wins.size)))  # (1, 2)
    at_once = max(1, NUMBERS_AT_ONCE // wins.size)
    weights = intervals.resamples(num_clusters, at_once)  # (R, G) each
    thetas = np.concatenate(
        [fit_logistic(covariate, wins, each[:, numbers], fitted)[:, 0] for each in weights]
    )
    win_rate, length_effect = float(expit(fitted[0, 0])), float(fitted[0, 1])
    low, high = intervals.percentile_interval(expit(thetas), win_rate)
    return LengthControlled(win_rate, low, high, length_effect)


def fit_logistic(
    covariate: Floats, outcomes: Floats, weights: NDArray[Any], start: Floats | float = 0.0
) -> Floats:
    """Logistic regressions on an intercept and a covariate, for R weightings of the observations.

    Newton's method, which is iteratively reweighted least squares (McCullagh and Nelder 1989,
    section 2.5), on the log-likelihood less PENALTY / 2 times the slope squared; all R at once,
    where a call of a library's minimiser for each resample takes seconds. A step is shortened until
    no linear predictor moves by more than 1/2: up to there the second derivative grows by less than
    a factor e^(1/2) (Bach 2010, lemma 1), so that every step climbs that the limit does not cut.
    The covariate (N,) is within [-1, 1]; the first guess, `start`, is (1, 2) or (R, 2). Of the
    result (R, 2) the intercepts are within +-MAX_INTERCEPT: one that would go on is held there,
    while the slope finds its maximum. A RuntimeError if no maximum is found.
    """
    from scipy.special import expit

    design = np.stack([np.ones_like(covariate), covariate], axis=1)  # (N, 2)
    products = design[:, :, None] * design[:, None, :]  # (N, 2, 2)
    penalty = np.array([0.0, PENALTY])
    limit = np.array([MAX_INTERCEPT, np.inf])
    fitted: Floats = np.zeros((len(weights), 2)) + start
    for _ in range(MAX_STEPS):
        chances = expit(fitted @ design.T)  # (R, N)
        gradient = (weights * (outcomes - chances)) @ design - penalty * fitted  # (R, 2)
        curvature = weights * np.maximum(chances * (1 - chances), 1e-12)  # (R, N)
        hessian = np.tensordot(curvature, products, 1) + np.diag(penalty)  # (R, 2, 2)
        step = np.linalg.solve(hessian, gradient[:, :, None])[:, :, 0]
        # At the limit and outward: the slope's own step is taken alone.
        is_held = (np.abs(fitted) >= limit) & (step * fitted > 0)  # (R, 2)
        if is_held.any():
            gradient = np.where(is_held, 0.0, gradient)
            is_uncoupled = is_held[:, :, None] | is_held[:, None, :]
            hessian = np.where(is_uncoupled, np.eye(2), hessian)
            step = np.linalg.solve(hessian, gradient[:, :, None])[:, :, 0]
        reach = np.abs(step).sum(1, keepdims=True)  # at least what a linear predictor moves by
        shorter = step * np.minimum(1.0, 0.5 / np.maximum(reach, 1e-300))
        moved: Floats = np.clip(fitted + shorter, -limit, limit)
        if np.abs(moved - fitted).max() < TOLERANCE:
            return moved
        fitted = moved
    raise RuntimeError(f"the regression of verdicts on length still moves after {MAX_STEPS} steps.")
