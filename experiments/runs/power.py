"""How many seeds? The power of a paired comparison over seeds: Student's two-sided test at 5%."""

import math
from dataclasses import dataclass

from common.evaluation.intervals import t_quantile
from common.record.terminal import NOT_MEASURED
from experiments.runs.outcomes import SeedMean

POWER = 0.8
MOST_SEEDS = 1000
HEADERS = ("found with 80%", "seeds needed")
NOTE = (
    "Found with 80%: the smallest true difference that these seeds find with a power of 80%. Seeds "
    "needed: to find a true difference as large as the mean with that power. Both are for a row "
    "alone (one star) and take the measured spread as the true one; two stars need more. A dash: "
    f"no spread, or more than {MOST_SEEDS:,} seeds."
)


@dataclass(frozen=True)
class Power:
    """Sensitivity of a paired comparison; None where nothing shows the spread."""

    detectable: float | None  # in the unit of the differences
    seeds_needed: int | None

    def cells(self, digits: int = 2) -> list[str]:
        """Of the columns `HEADERS`."""
        size = NOT_MEASURED if self.detectable is None else f"{self.detectable:.{digits}f}"
        return [size, str(self.seeds_needed or NOT_MEASURED)]


def power_of(difference: SeedMean) -> Power:
    """The power of a mean difference over seeds; of one seed, or equal ones, nothing is known."""
    mean, sd, n = difference.mean, difference.sd, difference.n
    if sd is None or math.isclose(mean, mean + sd):  # no spread beyond rounding
        return Power(None, None)
    return Power(detectable(sd / math.sqrt(n), n - 1), seeds_needed(mean, sd))


def detectable(standard_error: float, degrees: float) -> float:
    """The smallest true difference that is found with 80% power, in the unit of the error.

    It is the standard error of the mean difference, sd / sqrt(n), times the noncentrality at which
    Student's t of so many degrees of freedom, n - 1, exceeds its 97.5% quantile in 80% of all cases
    (Owen 1965, "The power of Student's t-test"). Significant differences of the wrong sign are not
    counted: they are at most one in a million.

    >>> [round(detectable(1 / n**0.5, degrees=n - 1), 2) for n in (2, 3, 5, 8)]
    [11.55, 3.26, 1.68, 1.16]
    """
    from scipy.special import nctdtrinc

    # Not by a root of `scipy.stats.nct`, whose cdf is NaN in the other tail for two seeds (1.17.1)
    return standard_error * float(nctdtrinc(degrees, 1 - POWER, t_quantile(degrees)))


def seeds_needed(difference: float, sd: float) -> int | None:
    """The fewest seeds that find a true difference with 80% power; None above `MOST_SEEDS`.

    `sd` is the standard deviation of the differences by seed, in the same unit.

    >>> [seeds_needed(difference, sd=1.0) for difference in (-12.0, 3.0, 1.0, 0.5, 0.0)]
    [2, 4, 10, 34, None]
    """
    sizes = range(2, MOST_SEEDS + 1)
    return next((n for n in sizes if detectable(sd / math.sqrt(n), n - 1) <= abs(difference)), None)
