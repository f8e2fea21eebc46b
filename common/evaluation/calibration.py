"""Whether sigma(r_chosen - r_rejected) is the share of pairs that annotators prefer that way.

The labels of a file of pairs all say "the first one", which a curve over them could not go through:
each pair counts on both sides, once with probability p and the observation 1, once with 1 - p and
the observation 0. The curve is therefore symmetric about (1/2, 1/2), and the middle bin is right by
construction. Ties have p = 1/2.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.evaluation.intervals import BOOTSTRAP_SEED, Floats, wilson_interval

NUM_BINS = 15  # of equal width, as in Guo et al. 2017, section 2; odd: a bin around 1/2
NUM_SIMULATIONS = 200


@dataclass(frozen=True)
class CalibrationBin:
    """Observations of both sides whose predicted probability is in one bin."""

    count: int  # over all bins twice the number of pairs
    predicted: float | None = None  # mean probability; None in an empty bin, as what follows
    observed: float | None = None  # share that was preferred
    low: float | None = None  # of its 95% Wilson interval
    high: float | None = None


@dataclass(frozen=True)
class Calibration:
    """How far predicted probabilities are from observed shares.

    Attributes:
        ece: Expected calibration error (Guo et al. 2017, eq. 3): mean |observed - predicted| over
            the bins, weighted by their counts.
        ece_by_chance: What it would be on average if every prediction were right, at this number of
            pairs; the error is never 0 in a finite sample.
        log_loss: Mean -log sigma(margin), in nats per pair; ln 2 for a coin.
        bins: `NUM_BINS` of equal width, from 0 to 1.
    """

    ece: float
    ece_by_chance: float
    log_loss: float
    bins: list[CalibrationBin]


def calibration(margins: Floats) -> Calibration:
    """The calibration of log odds.

    Args:
        margins: (N,) r_chosen - r_rejected, N at least 1: what the Bradley-Terry model takes the
            log odds of the label to be.
    """
    from scipy.special import expit

    p = expit(margins)  # (N,)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    by_chance = [
        calibration_error(*binned(p, generator.random(p.size) < p)) for _ in range(NUM_SIMULATIONS)
    ]
    parts = binned(p, np.ones(p.size, dtype=bool))
    return Calibration(
        calibration_error(*parts),
        float(np.mean(by_chance)),
        float(np.logaddexp(0.0, -margins).mean()),
        [calibration_bin(*map(float, part)) for part in zip(*parts, strict=True)],
    )


def binned(
    p: Floats, is_preferred: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Both sides of each pair in equal bins.

    Args:
        p: (N,) predicted probability of one side.
        is_preferred: (N,) bool, whether that side was preferred.

    Returns:
        counts, sums of predicted probability, sums of preferred: each (NUM_BINS,).
    """
    places = np.minimum((p * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    # Mirrored and not computed of 1 - p, so that a p on an edge keeps the curve symmetric.
    places = np.concatenate([places, NUM_BINS - 1 - places])  # (2N,)
    counts = np.bincount(places, minlength=NUM_BINS)
    predicted = np.bincount(places, np.concatenate([p, 1 - p]), NUM_BINS)
    observed = np.bincount(places, np.concatenate([is_preferred, ~is_preferred]), NUM_BINS)
    return counts, predicted, observed


def calibration_error(
    counts: NDArray[Any], predicted: NDArray[Any], observed: NDArray[Any]
) -> float:
    """The expected calibration error of what `binned` returns."""
    return float(np.abs(observed - predicted).sum() / counts.sum())


def calibration_bin(count: float, predicted: float, observed: float) -> CalibrationBin:
    """A bin of its count and the sums of predicted and observed."""
    if count == 0:
        return CalibrationBin(0)
    interval = wilson_interval(observed, count)
    return CalibrationBin(int(count), predicted / count, observed / count, *interval)
