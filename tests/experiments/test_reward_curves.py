"""Claim: best of n is estimated without bias, curves are fitted, and a drop is no accident.

Targets of best of n and the bound of its KL: the mean over all subsets of a pool, which has no
bias, and the exact distribution of the best of n on a finite support. Of the fits of both forms of
Gao et al. (2022): points made by the paper's formulas. Of a drop: curves without one.
"""

import math
from itertools import combinations

import numpy as np
import pytest

from experiments.overoptimization.curves import best_of_n, best_of_n_kl, distance, drop, fit


def best_of_subset(proxy: np.ndarray, values: np.ndarray, subset: tuple[int, ...]) -> float:
    """The mean value of those that have the subset's largest proxy reward."""
    chosen = np.array(subset)
    return values[chosen][proxy[chosen] == proxy[chosen].max()].mean()


@pytest.mark.parametrize("has_ties", [False, True])
def test_the_estimate_is_the_mean_over_all_subsets(has_ties):
    generator = np.random.default_rng(0)
    proxy = generator.normal(size=(3, 7))
    if has_ties:
        proxy = generator.integers(0, 3, size=(3, 7)).astype(float)
    values = generator.normal(size=(3, 7))
    sizes = [1, 2, 4, 7]
    found = best_of_n(proxy, values, sizes)
    for row, size in enumerate(sizes):
        for prompt in range(3):
            own = (proxy[prompt], values[prompt])
            wanted = np.mean([best_of_subset(*own, s) for s in combinations(range(7), size)])
            assert found[row, prompt] == pytest.approx(wanted, abs=1e-12)


def best_distribution(probabilities: np.ndarray, size: int) -> np.ndarray:
    """Of the best of n over completions in ascending order of the proxy."""
    below = np.concatenate([[0.0], probabilities.cumsum()])
    return np.diff(below**size)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_the_kl_is_that_of_many_small_completions_and_a_bound_for_few(size):
    for number in (2, 3, 10, 100_000):
        uniform = np.full(number, 1 / number)
        best = best_distribution(uniform, size)
        there = best > 0  # of two completions the worse is never the best of 64, in float64
        exact = float((best[there] * np.log(best[there] / uniform[there])).sum())
        assert exact <= best_of_n_kl(size) + 1e-9
    assert exact == pytest.approx(best_of_n_kl(size), abs=2e-3)  # of the most completions
    assert best_of_n_kl(1) == 0


# ---- curves --------------------------------------------------------------------------------------

D = np.array([0.0, 0.4, 0.8, 1.5, 2.5, 4.0])


def literal(form: str, d: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """The formulas of section 3.1, with R(0) = 0."""
    inner = beta * d if form == "bon" else beta * np.log(np.where(d > 0, d, 1.0))
    return d * (alpha - inner)


@pytest.mark.parametrize(("form", "alpha", "beta"), [("bon", 0.7, 0.2), ("rl", 0.3, 0.4)])
def test_the_parameters_of_exact_points_are_found(form, alpha, beta):
    found = fit(form, D, literal(form, D, alpha, beta))
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), abs=1e-5)
    assert found.rmse == pytest.approx(0, abs=1e-5)
    fine = np.linspace(0.01, 6, 100_000)
    curve = literal(form, fine, alpha, beta)
    assert found.at(fine) == pytest.approx(curve, abs=1e-4)


@pytest.mark.parametrize("form", ["bon", "rl"])
def test_no_other_parameters_have_a_smaller_residual(form):
    gains = np.random.default_rng(0).normal(size=D.shape)
    found = fit(form, D, gains)

    def rmse(alpha: float, beta: float) -> float:
        return math.sqrt(np.mean((literal(form, D, alpha, beta) - gains) ** 2))

    assert rmse(found.alpha, found.beta) == pytest.approx(found.rmse, abs=1e-6)
    for step in (-1e-2, 1e-2):
        assert rmse(found.alpha + step, found.beta) > found.rmse
        assert rmse(found.alpha, found.beta + step) > found.rmse


def test_an_estimate_of_kl_below_zero_counts_as_zero():
    assert (distance(-0.01), distance(4.0)) == (0.0, 2.0)


def test_a_drop_is_from_the_largest_mean_of_every_other_prompt_to_the_last_on_those_between():
    gains = np.array([[0.0, 9.0, 0.2, 9.0], [1.0, 0.5, 0.6, 0.1], [0.9, 0.3, 0.1, 0.2]])
    peak, change = drop(gains)
    assert peak == 1
    assert change == pytest.approx([-0.2, 0.1])


def test_flat_curves_seldom_look_as_if_they_turned():
    """The largest of ten equal means, tested on its own prompts, did so in one case of eight."""
    generator = np.random.default_rng(6)
    turned = 0
    for _ in range(400):
        _, change = drop(generator.normal(size=(10, 128)))
        error = change.std(ddof=1) / len(change) ** 0.5
        turned += change.mean() + 1.96 * error < 0
    assert 0.005 <= turned / 400 <= 0.05  # 2.5% within three standard errors
