"""What may be concluded from a few training seeds: means with Student's interval, paired by seed.

The interval takes the seeds' results as a sample from a normal distribution. It covers the draw
of initialisation, row order and sampling noise, not that of the evaluation rows, which all seeds
share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.evaluation.intervals import finite_vector, t_quantile


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
    half_width = t_quantile(n - 1) * sd / math.sqrt(n)
    return SeedMean(mean, sd, mean - half_width, mean + half_width, n)


def paired_difference(values: Sequence[float], base: Sequence[float]) -> SeedMean:
    """Mean over seeds of value minus base of the same seed: what both share cancels."""
    assert len(values) == len(base), f"{len(values)} values, {len(base)} of the base"
    return over_seeds([value - start for value, start in zip(values, base, strict=True)])
