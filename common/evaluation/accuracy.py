"""Preference accuracy, with the interval of a share of independent pairs."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from common.losses import wins
from common.record.glossary import with_interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval; without ends where nothing shows how prompts differ."""

    mean: float
    low: float | None
    high: float | None
    count: int = 0  # of the measured values


@dataclass(frozen=True)
class PreferenceAccuracy:
    """Share of pairs whose chosen completion a system scores above the rejected one."""

    accuracy: float  # (wins + ties / 2) / pairs, in [0, 1]
    low: float  # of the 95% Wilson interval
    high: float
    num_pairs: int
    num_ties: int  # pairs whose two scores are equal
    num_prompts: int = 0
    prompt_low: float | None = None  # of the 95% bootstrap over prompts, if there are enough
    prompt_high: float | None = None

    @property
    def interval(self) -> Interval:
        """The accuracy with Wilson's interval."""
        return Interval(self.accuracy, self.low, self.high, self.num_pairs)

    @property
    def over_prompts(self) -> Interval:
        """The accuracy with its interval over prompts."""
        return Interval(self.accuracy, self.prompt_low, self.prompt_high, self.num_pairs)

    @property
    def metrics(self) -> dict[str, float]:
        """The accuracy and its interval as logged metrics."""
        return with_interval("eval_accuracy", self.accuracy, self.low, self.high)


def wilson_interval(successes: float, total: float, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927; Brown, Cai and DasGupta 2001, eq. 4).

    Unlike p +- z sqrt(p (1 - p) / n) it stays inside [0, 1], and has a width at p = 0 and 1.
    (scipy's takes whole numbers of successes only: here a tie is half of one.) `z` is the standard
    normal quantile, 1.96 for 95%.

    >>> [round(end, 3) for end in wilson_interval(successes=8, total=10)]
    [0.49, 0.943]
    """
    assert total > 0, "an interval needs trials"
    assert 0 <= successes <= total, f"{successes} successes in {total} trials"
    share, z_squared = successes / total, z * z
    centre = (share + z_squared / (2 * total)) / (1 + z_squared / total)
    variance = share * (1 - share) / total + z_squared / (4 * total * total)
    half_width = z * math.sqrt(variance) / (1 + z_squared / total)
    # At 0 and at `total` an end is the share exactly, which rounding must not put it beyond.
    return max(0.0, min(share, centre - half_width)), min(1.0, max(share, centre + half_width))


def preference_accuracy(counts: Floats) -> PreferenceAccuracy:
    """The mean of `outcomes` (N,).

    The interval takes the pairs as independent, and with ties it is a little too wide.
    """
    low, high = wilson_interval(float(counts.sum()), counts.size)
    num_ties = int((counts == 0.5).sum())
    return PreferenceAccuracy(float(counts.mean()), low, high, counts.size, num_ties)


def outcomes(chosen_scores: Tensor | ArrayLike, rejected_scores: Tensor | ArrayLike) -> Floats:
    """Outcome of each pair, (N,): 1 if chosen scores higher, 0.5 in a tie, else 0.

    A tie counts one half: as a failure it would punish coarse scores (bfloat16 rewards tie often),
    as a success it would give a constant score 100%. A score that is not finite would silently
    count as a failure: it is a RuntimeError.
    """
    chosen, rejected = finite_vector(chosen_scores), finite_vector(rejected_scores)  # (N,)
    assert chosen.shape == rejected.shape, f"{chosen.shape} chosen, {rejected.shape} rejected"
    return np.asarray(wins(chosen, rejected))


def finite_vector(values: Tensor | ArrayLike) -> Floats:
    """`values` as (N,) float64, N at least 1; a RuntimeError if one is not finite."""
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    vector = np.asarray(values, dtype=np.float64)
    assert vector.ndim == 1, f"shape {vector.shape}, one dimension expected"
    assert vector.size > 0, "statistics of nothing"
    num_bad = int((~np.isfinite(vector)).sum())
    if num_bad:
        raise RuntimeError(f"{num_bad} of {vector.size} values are not finite.")
    return vector
