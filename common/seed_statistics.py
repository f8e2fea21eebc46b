"""What may be concluded from a few training seeds: means with Student's interval, paired by seed.

The interval takes the seeds' results as a sample from a normal distribution. It covers the draw
of initialisation, row order and sampling noise, not that of the evaluation rows, which all seeds
share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.statistics import finite_vector

CONFIDENCE = 0.95


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Attributes:
        mean: over the n values.
        sd: unbiased standard deviation; None for one value.
        low: lower end of the 95% t interval; None for one value.
        high: upper end.
        n: number of seeds.
    """

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0; never for one value."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def over_seeds(values: Sequence[float]) -> SeedMean:
    """Mean and interval mean +- t sd / sqrt(n) of independent values (Student 1908).

    Args:
        values: one per seed, at least one.

    Raises:
        RuntimeError: a value is not finite.
    """
    vector = finite_vector(list(values))  # (n,)
    n, mean = vector.size, float(vector.mean())
    if n == 1:
        return SeedMean(mean, None, None, None, 1)
    sd = float(vector.std(ddof=1))
    half_width = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * sd / math.sqrt(n)
    return SeedMean(mean, sd, mean - half_width, mean + half_width, n)


def paired_difference(values: Sequence[float], base: Sequence[float]) -> SeedMean:
    """Mean over seeds of value minus base of the same seed: what both share cancels."""
    assert len(values) == len(base), f"{len(values)} values, {len(base)} of the base"
    return over_seeds([value - start for value, start in zip(values, base, strict=True)])


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, by bisection.

    Args:
        probability: in [0.5, 1).
        degrees: of freedom, at least 1.
    """
    assert 0.5 <= probability < 1, probability
    low, high = 0.0, 1.0
    while 0.5 + t_central(high, degrees) / 2 < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        is_below = 0.5 + t_central(middle, degrees) / 2 < probability
        low, high = (middle, high) if is_below else (low, middle)
    return (low + high) / 2


def t_central(t: float, degrees: int) -> float:
    """P(|T| < t) of Student's t (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(degrees // 2):
        total += term
        first = 2 * k + 1 + is_odd
        term *= math.cos(angle) ** 2 * first / (first + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
