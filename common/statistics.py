"""What may be concluded from a finite sample: preference accuracy, its interval, means.

Pure functions of the scores. Every number that evaluation reports passes through here, so that two
systems are counted by the same rules.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class PreferenceAccuracy:
    """How often a system scores the chosen completion above the rejected one.

    Attributes:
        accuracy: (wins + ties / 2) / pairs, in [0, 1].
        low: lower end of the 95% Wilson interval.
        high: upper end of the 95% Wilson interval.
        num_pairs: pairs compared.
        num_ties: pairs whose two scores are equal.
    """

    accuracy: float
    low: float
    high: float
    num_pairs: int
    num_ties: int


def wilson_interval(successes: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927; Brown, Cai and DasGupta 2001, eq. 4).

    Unlike p +- z sqrt(p (1 - p) / n) it stays inside [0, 1], and has a width at p = 0 and 1.

    Args:
        successes: how many of `total` succeeded; may be fractional, a tie being half a success.
        total: number of trials, at least 1.
        z: standard normal quantile, 1.96 for 95%.

    Returns:
        (low, high).
    """
    assert total > 0, "an interval needs at least one trial"
    assert 0 <= successes <= total, f"{successes} successes in {total} trials"
    share, z_squared = successes / total, z * z
    centre = (share + z_squared / (2 * total)) / (1 + z_squared / total)
    variance = share * (1 - share) / total + z_squared / (4 * total * total)
    half_width = z * math.sqrt(variance) / (1 + z_squared / total)
    # At 0 and at `total` the ends are 0 and 1 exactly; rounding must not leave [0, 1].
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def preference_accuracy(
    chosen_scores: Tensor | ArrayLike, rejected_scores: Tensor | ArrayLike
) -> PreferenceAccuracy:
    """Share of pairs in which the chosen completion has the higher score.

    Ties: a pair with exactly equal scores counts as half a success and is reported. Counting ties
    as failures would punish coarse scores (bfloat16 rewards tie often), and counting them as
    successes would give a constant score 100%; with one half a constant score gets 50%.

    The interval takes the pairs as independent, and with ties it is a little too wide: a tie varies
    less than a win or a loss.

    Args:
        chosen_scores: (N,) score of the preferred completion of each pair.
        rejected_scores: (N,) score of the other one.

    Returns:
        The accuracy with its 95% Wilson interval and the number of ties.

    Raises:
        RuntimeError: a score is not finite; it would silently count as a failure.
    """
    chosen, rejected = finite_vector(chosen_scores), finite_vector(rejected_scores)  # (N,)
    assert chosen.shape == rejected.shape, f"{chosen.shape} chosen, {rejected.shape} rejected"
    num_ties = int((chosen == rejected).sum())
    successes = int((chosen > rejected).sum()) + num_ties / 2
    low, high = wilson_interval(successes, chosen.size)
    return PreferenceAccuracy(successes / chosen.size, low, high, chosen.size, num_ties)


def mean_interval(values: Tensor | ArrayLike) -> tuple[float, float, float]:
    """Mean with its 95% percentile bootstrap interval (Efron and Tibshirani 1993, section 13.3).

    The resampling seed is fixed and the values are sorted first, so that the same values give the
    same interval, in whatever order the ranks delivered them. Below about 20 values the interval is
    too narrow; a single value has an interval of width 0.

    Args:
        values: (N,) independent observations, N at least 1.

    Returns:
        (mean, low, high).

    Raises:
        RuntimeError: a value is not finite.
    """
    ordered = np.sort(finite_vector(values))  # (N,)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    means = np.empty(NUM_RESAMPLES)
    for resample in range(NUM_RESAMPLES):  # one at a time: 2000 x N indices may not fit in memory
        means[resample] = ordered[generator.integers(0, ordered.size, ordered.size)].mean()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(ordered.mean()), float(low), float(high)


def finite_vector(values: Tensor | ArrayLike) -> NDArray[np.float64]:
    """`values` as (N,) float64, N at least 1.

    Raises:
        RuntimeError: a value is not finite.
    """
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    vector = np.asarray(values, dtype=np.float64)
    assert vector.ndim == 1, f"shape {vector.shape}, one dimension expected"
    assert vector.size > 0, "statistics of nothing"
    num_bad = int((~np.isfinite(vector)).sum())
    if num_bad:
        raise RuntimeError(f"{num_bad} of {vector.size} values are not finite.")
    return vector
