"""Claim: simulated studies have the computed power; without a spread there is no number.

Targets: paired t tests of simulated seeds, and statsmodels' TTestPower, which counts significant
differences of the wrong sign too. About `experiments.runs.power`.
"""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from experiments.runs.outcomes import over_seeds
from experiments.runs.power import MOST_SEEDS, POWER, detectable, power_of, seeds_needed

NUM_STUDIES = 20_000
PAIRED = TTestPower()


def share_found(difference: float, sd: float, n: int) -> float:
    """Share of simulated studies of n seeds whose paired t test at 5% finds a true difference.

    What base and variant share, the seed's effect, has ten times the spread of their difference.
    """
    generator = np.random.default_rng(54)
    base = generator.normal(0, 10 * sd, (NUM_STUDIES, n))
    variant = base + generator.normal(difference, sd, (NUM_STUDIES, n))
    return float((stats.ttest_rel(variant, base, axis=1).pvalue < 0.05).mean())


@pytest.mark.parametrize("n", [2, 3, 8])
def test_simulated_studies_find_the_difference_in_four_of_five_cases(n):
    difference, error = detectable(2.5 / n**0.5, n - 1), (0.8 * 0.2 / NUM_STUDIES) ** 0.5
    assert share_found(difference, 2.5, n) == pytest.approx(0.8, abs=3 * error)
    assert share_found(0.8 * difference, 2.5, n) < 0.8 - 10 * error


@pytest.mark.parametrize("difference", [-0.5, 1.0, 3.0])
def test_as_many_seeds_as_needed_find_it_and_one_fewer_do_not(difference):
    n, error = seeds_needed(difference, 1.2), (0.8 * 0.2 / NUM_STUDIES) ** 0.5
    assert share_found(difference, 1.2, n) > 0.8 - 3 * error
    effect = abs(difference) / 1.2
    assert PAIRED.power(effect, n, 0.05) >= POWER > PAIRED.power(effect, n - 1, 0.05)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 100, MOST_SEEDS])
def test_statsmodels_gives_a_detectable_difference_the_same_power(n):
    power = PAIRED.power(detectable(1 / n**0.5, n - 1), n, 0.05)
    assert power == pytest.approx(POWER, abs=2e-6)


def test_power_is_that_of_the_measured_spread():
    power = power_of(over_seeds([1.0, 2.0, 4.5]))
    sd = float(np.std([1.0, 2.0, 4.5], ddof=1))
    assert power.detectable == pytest.approx(sd * PAIRED.solve_power(nobs=3, alpha=0.05, power=0.8))
    assert power.seeds_needed == np.ceil(PAIRED.solve_power(2.5 / sd, alpha=0.05, power=0.8))
    assert power.cells() == [f"{power.detectable:.2f}", str(power.seeds_needed)]


@pytest.mark.parametrize("values", [[0.4], [0.0, 0.0], [0.1, 0.1, 0.1], [80.3 - 80.2, 70.3 - 70.2]])
def test_without_a_spread_there_is_no_number(values):
    power = power_of(over_seeds(values))
    assert (power.detectable, power.seeds_needed, power.cells()) == (None, None, ["–", "–"])


@pytest.mark.parametrize("difference", [0.0, 1e-17, 2.8 / MOST_SEEDS**0.5])
def test_no_number_of_seeds_finds_nothing_at_all(difference):
    assert seeds_needed(difference, 1.0) is None
    assert power_of(over_seeds([1.0, -1.0])).cells()[1] == "–"
