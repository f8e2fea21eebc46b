"""What may be concluded from a finite sample: means and shares with 95% intervals.

Rows with the same prompt are drawn together (`bootstrap_means`); where every prompt occurs once the
rows are independent, and simpler intervals hold. A value that was not measured, None, is left out,
and `count` says how many are in. Resampling is seeded: the same values, the same interval.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from common.evaluation.accuracy import Floats, Interval, finite_vector, wilson_interval

NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 0
NUMBERS_AT_ONCE = 2**16  # of a chunk of resamples, which a CPU's cache holds
MIN_PROMPTS = 10  # below, resamples of prompts say next to nothing, and of one prompt, nothing

Numbers = NDArray[np.int64]
Values = Sequence[float | None]


# ---- resampling ----------------------------------------------------------------------------------


def cluster_numbers(keys: Sequence[Hashable]) -> Numbers:
    """Cluster number of each observation, (N,), in the order of first appearance of the keys."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def resamples(num_clusters: int, at_once: int) -> Iterator[Numbers]:
    """Counts of each cluster, (R, G), in NUM_RESAMPLES draws of G clusters, R at once.

    The same in every process, and whatever the number at once: all 2000 x G may not fit in memory.
    """
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    for start in range(0, NUM_RESAMPLES, at_once):
        num_rows = min(at_once, NUM_RESAMPLES - start)
        drawn = generator.integers(0, num_clusters, (num_rows, num_clusters))
        numbers = drawn + num_clusters * np.arange(num_rows)[:, None]  # other ones in each row
        yield np.bincount(numbers.ravel(), minlength=numbers.size).reshape(numbers.shape)


def bootstrap_means(values: Floats, clusters: Numbers) -> Floats:
    """Means (NUM_RESAMPLES, S) of resamples of whole clusters (Davison and Hinkley 1997, 3.8).

    Observations of a cluster are kept together because they resemble each other: pairs of one
    prompt are right or wrong together, and drawing them apart would make the interval too narrow.
    The mean is over the observations that the drawn clusters hold. The columns share the draws, so
    that the difference of two columns is the paired bootstrap. `values` (N, S) are N observations
    of S quantities, `clusters` (N,) the numbers of their clusters, 0 .. G - 1, all used.
    """
    sizes = np.bincount(clusters)  # (G,)
    assert sizes.all(), "a cluster without observations"
    sums = np.zeros((sizes.size, values.shape[1]))  # (G, S)
    np.add.at(sums, clusters, values)
    totals = np.column_stack([sums, sizes])  # (G, S + 1)
    times = resamples(sizes.size, max(1, NUMBERS_AT_ONCE // sizes.size))  # (R, G) each
    drawn = np.concatenate([each @ totals for each in times])
    means: Floats = drawn[:, :-1] / drawn[:, -1:]
    return means


def percentile_interval(means: Floats, estimate: float) -> tuple[float, float]:
    """The percentile interval (low, high) of bootstrap means (R,) around what they estimate.

    Of equal values the means differ from the estimate by rounding, which is left out.
    """
    low, high = np.quantile(means, (0.025, 0.975))
    return min(float(low), estimate), max(float(high), estimate)


def mean_interval(values: Tensor | ArrayLike) -> tuple[float, float, float]:
    """Mean, low and high of the percentile bootstrap (Efron and Tibshirani 1993, section 13.3).

    The (N,) independent values are sorted first, so that the order in which ranks delivered them
    changes nothing. Below about 20 the interval is too narrow; of a single one it has width 0. A
    value that is not finite is a RuntimeError.
    """
    ordered = np.sort(finite_vector(values))  # (N,)
    means = bootstrap_means(ordered[:, None], np.arange(ordered.size))
    mean = float(ordered.mean())
    return mean, *percentile_interval(means[:, 0], mean)


def t_quantile(degrees: float, family: int = 1) -> float:
    """The quantile of Student's t for two-sided intervals: 95% for a whole family of them.

    Each of the family may err in 0.05 / family of all cases, and so one or more of them in 0.05 at
    most, however they depend on each other (Bonferroni; Dunn 1961).

    >>> [round(t_quantile(degrees=2, family=size), 2) for size in (1, 9)]
    [4.3, 13.36]
    """
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - 0.025 / family))


# ---- over prompts --------------------------------------------------------------------------------


def mean_over_prompts(
    values: Values, prompts: Sequence[Hashable], weights: Sequence[float] | None = None
) -> Interval | None:
    """Mean of the measured values with its bootstrap interval; None without any.

    Of a single prompt low and high are None, here and below: nothing shows how prompts differ. The
    N keys of `prompts` are equal for rows of the same prompt. Where a value is a mean over tokens,
    their numbers as `weights` give the mean over all tokens.
    """
    measured, clusters, kept = _measured(values, prompts, weights)
    if not measured.size:
        return None
    mean, low, high = float(np.average(measured, weights=kept)), None, None
    if weights is None and 1 < measured.size == clusters.max() + 1:
        mean, low, high = mean_interval(measured)
    elif clusters.any():
        sums = bootstrap_means(np.stack([measured * kept, kept], axis=1), clusters)
        low, high = percentile_interval(sums[:, 0] / sums[:, 1], mean)
    return Interval(mean, low, high, measured.size)


def share_over_prompts(values: Values, prompts: Sequence[Hashable]) -> Interval | None:
    """Mean of values in [0, 1] with Wilson's interval for the effective sample size.

    That is the number of independent successes and failures whose share would vary as much as this
    mean does: more than N where ties or probabilities vary less, fewer where rows of a prompt are
    alike (Korn and Graubard 1998; with Wilson's interval Franco et al. 2019). Where every prompt
    has the same share nothing shows a variance: then as many as there are prompts are counted.
    The variance is itself estimated, of G prompts with G - 1 degrees of freedom, so that Student's
    quantile stands in the place of the normal one.
    """
    measured, clusters, _ = _measured(values, prompts)
    if not measured.size:
        return None
    mean = float(measured.mean())
    sums = np.bincount(clusters, weights=measured - mean)  # (G,)
    effective_size, low, high = float(sums.size), None, None
    if sums.size > 1:
        if not np.allclose(sums, 0, rtol=0, atol=1e-9):  # beyond what rounding leaves
            variance = float(sums @ sums) / measured.size**2 * sums.size / (sums.size - 1)
            effective_size = mean * (1 - mean) / variance
        z = t_quantile(sums.size - 1)
        low, high = wilson_interval(mean * effective_size, effective_size, z)
    return Interval(mean, low, high, measured.size)


def _measured(
    values: Values, prompts: Sequence[Hashable], weights: Sequence[float] | None = None
) -> tuple[Floats, Numbers, Floats]:
    """The values that are there, the numbers of their prompts, their weights (1 by default)."""
    weights = [1.0] * len(values) if weights is None else weights
    rows = [row for row in zip(values, prompts, weights, strict=True) if row[0] is not None]
    measured, kept = (np.array([row[i] for row in rows], dtype=np.float64) for i in (0, 2))
    return measured, cluster_numbers([key for _, key, _ in rows]), kept
