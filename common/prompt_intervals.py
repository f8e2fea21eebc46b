"""Means and shares over prompts with 95% intervals, ready for JSON.

Rows with the same prompt are drawn together (`statistics.bootstrap_means`); where every prompt
occurs once the rows are independent, and simpler intervals hold. A value that was not measured,
None, is left out, and `count` says how many are in.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.statistics import (
    bootstrap_means,
    cluster_numbers,
    mean_interval,
    percentile_interval,
    t_quantile,
    wilson_interval,
)

Values = Sequence[float | None]


def mean_over_prompts(values: Values, prompts: Sequence[Hashable]) -> dict[str, Any] | None:
    """Mean of the measured values with its bootstrap interval; None without any.

    Of a single prompt low and high are None, here and below: nothing shows how prompts differ.

    Args:
        values: N numbers, or None where nothing was measured.
        prompts: N keys, equal for rows of the same prompt.
    """
    measured, clusters = _measured(values, prompts)
    if not measured.size:
        return None
    mean, low, high = float(measured.mean()), None, None
    if _all_differ(clusters) and measured.size > 1:
        mean, low, high = mean_interval(measured)
    elif clusters.any():
        low, high = percentile_interval(bootstrap_means(measured[:, None], clusters)[:, 0], mean)
    return {"mean": mean, "low": low, "high": high, "count": measured.size}


def mean_over_tokens(
    values: Values, num_tokens: Sequence[int], prompts: Sequence[Hashable]
) -> dict[str, Any] | None:
    """Mean over tokens of what is a mean over each row's tokens; the bootstrap draws prompts.

    Args:
        values: N means over a row's tokens.
        num_tokens: N, each positive.
        prompts: As there.
    """
    measured, clusters = _measured(values, prompts)
    if not measured.size:
        return None
    counts = [n for n, value in zip(num_tokens, values, strict=True) if value is not None]
    weights = np.array(counts, dtype=np.float64)
    mean, low, high = float(np.average(measured, weights=weights)), None, None
    if clusters.any():
        means = bootstrap_means(np.stack([measured * weights, weights], axis=1), clusters)
        low, high = percentile_interval(means[:, 0] / means[:, 1], mean)
    return {"mean": mean, "low": low, "high": high, "count": measured.size}


def share_over_prompts(values: Values, prompts: Sequence[Hashable]) -> dict[str, Any] | None:
    """Mean of values in [0, 1] with Wilson's interval for the effective sample size.

    That is the number of independent successes and failures whose share would vary as much as this
    mean does: more than N where ties or probabilities vary less, fewer where rows of a prompt are
    alike (Korn and Graubard 1998; with Wilson's interval Franco et al. 2019). Where every prompt
    has the same share nothing shows a variance: then as many as there are prompts are counted.
    The variance is itself estimated, of G prompts with G - 1 degrees of freedom, so that Student's
    quantile stands in the place of the normal one.
    """
    measured, clusters = _measured(values, prompts)
    if not measured.size:
        return None
    mean = float(measured.mean())
    found = {"mean": mean, "low": None, "high": None, "count": measured.size}
    sums = np.bincount(clusters, weights=measured - mean)  # (G,)
    effective_size = float(sums.size)
    if sums.size < 2:
        return found
    if not np.allclose(sums, 0, rtol=0, atol=1e-9):  # beyond what rounding leaves
        variance = float(sums @ sums) / measured.size**2 * sums.size / (sums.size - 1)
        effective_size = mean * (1 - mean) / variance
    z = t_quantile(0.975, sums.size - 1)
    low, high = wilson_interval(mean * effective_size, effective_size, z)
    return found | {"low": low, "high": high}


def _measured(
    values: Values, prompts: Sequence[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The values that are there, and the numbers of their prompts."""
    kept = [(v, key) for v, key in zip(values, prompts, strict=True) if v is not None]
    numbers = np.array([value for value, _ in kept], dtype=np.float64)
    return numbers, cluster_numbers([key for _, key in kept])


def _all_differ(clusters: NDArray[np.int64]) -> bool:
    return int(clusters.max()) + 1 == clusters.size
