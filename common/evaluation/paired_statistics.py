"""Whether one system is right more often than another on the same pairs.

Both systems meet the same easy and hard pairs, so their difference is known better than either
accuracy: two intervals that overlap say little, the interval of the difference says it. Pure
functions of what each pair counts in the accuracy (`intervals.outcomes`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.evaluation.intervals import (
    BOOTSTRAP_SEED,
    NUM_RESAMPLES,
    bootstrap_means,
    cluster_sums,
    percentile_interval,
)

MIN_PROMPTS = 10  # below, resamples of prompts say next to nothing, and of one prompt, nothing


@dataclass(frozen=True)
class PairedDifference:
    """Accuracy of one system minus that of another.

    Attributes:
        first: Name of the system.
        second: Name of the one it is compared with.
        difference: In [-1, 1].
        low: Lower end of the 95% interval, of the paired bootstrap over prompts; None below
            `MIN_PROMPTS` of them.
        high: Upper end.
        num_first_better: Pairs on which the first counts more; a tie counts one half.
        num_second_better: Pairs on which the second counts more.
        p_value: McNemar's, exact and two-sided. It takes pairs as independent, and is too small
            where a prompt has several that are alike.
        prompt_p_value: Of the permutation test over prompts, two-sided, which does not; at least
            1 / (NUM_RESAMPLES + 1), and never below 0.05 with 5 prompts or fewer.
    """

    first: str
    second: str
    difference: float
    low: float | None
    high: float | None
    num_first_better: int
    num_second_better: int
    p_value: float
    prompt_p_value: float


def mcnemar_p_value(num_first_better: int, num_second_better: int) -> float:
    """Exact two-sided p-value of McNemar's test, at any number of discordant pairs.

    Under the null a discordant pair favours either system with probability 1/2, so the smaller
    count is binomial (McNemar 1947; exact form in Agresti 2013, section 11.1): twice its lower
    tail, at most 1.

    Args:
        num_first_better: Discordant pairs that favour the first system.
        num_second_better: Those that favour the second.
    """
    smaller = min(num_first_better, num_second_better)
    total = num_first_better + num_second_better
    counts = np.arange(1, smaller + 1)
    # log C(n, k) by its recurrence: C(n, k) itself is too large for a float above n = 1000
    log_choices = np.concatenate([[0.0], np.log((total - counts + 1) / counts).cumsum()])
    log_tail = np.logaddexp.reduce(log_choices) - total * math.log(2)
    return min(1.0, 2 * math.exp(log_tail))


def prompt_interval(
    means: NDArray[np.float64], estimate: float, num_prompts: int
) -> tuple[float, float] | tuple[None, None]:
    """The interval of bootstrap means (R,) over prompts, none where they are too few."""
    return (None, None) if num_prompts < MIN_PROMPTS else percentile_interval(means, estimate)


def sign_flips(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Random signs of the clusters, summed.

    Were two systems equally good, either might have had the other's wins on all pairs of a prompt:
    that swap turns the sign of the prompt's difference (Good 2005, section 3.2, matched pairs). The
    columns share the signs, so that the difference of two columns is that of the two systems.

    Args:
        sums: (G, S) of each cluster.

    Returns:
        (NUM_RESAMPLES, S), the same in every process.
    """
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    # One bit a cluster, and then to +-1: 2000 x G numbers may not fit in memory.
    bits = generator.integers(0, 2, (NUM_RESAMPLES, len(sums)), dtype=np.int8)
    return np.array([(2.0 * row - 1.0) @ sums for row in bits])


def paired_differences(
    wins: Mapping[str, NDArray[np.float64]], clusters: NDArray[np.int64]
) -> list[PairedDifference]:
    """Every two systems compared, those named first with those behind them.

    A pair is discordant if it counts more for one system: with a tie of one of them the other's win
    or loss decides, by one half. p-values are not corrected for the number of comparisons.

    Args:
        wins: (N,) outcomes of each system on the same pairs.
        clusters: (N,) which pairs belong together, as in `bootstrap_means`.
    """
    names = list(wins)
    if len(names) < 2:
        return []
    columns = np.stack([wins[name] for name in names], axis=1)  # (N, S)
    means = bootstrap_means(columns, clusters)  # (R, S)
    sums = cluster_sums(columns, clusters)  # (G, S)
    flipped = sign_flips(sums)  # (R, S)
    found = []
    for i in range(len(names)):
        for j in range(i + 1, len(names)):
            gains = columns[:, i] - columns[:, j]  # (N,)
            better, worse = int((gains > 0).sum()), int((gains < 0).sum())
            gain = float(gains.mean())
            low, high = prompt_interval(means[:, i] - means[:, j], gain, len(sums))
            by_chance = np.abs(flipped[:, i] - flipped[:, j])  # (R,)
            num_as_far = int((by_chance >= abs(gains.sum())).sum())  # exact: multiples of 1/2
            found.append(
                PairedDifference(
                    names[i],
                    names[j],
                    gain,
                    low,
                    high,
                    better,
                    worse,
                    mcnemar_p_value(better, worse),
                    (1 + num_as_far) / (1 + NUM_RESAMPLES),
                )
            )
    return found
