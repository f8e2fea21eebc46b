"""Claim: best of n is estimated without bias from one pool, and its closed-form KL is a bound.

Targets: all subsets of a pool, all pools of a small alphabet, and the exact distribution of the
best of n on a finite support.
"""

from itertools import combinations, product

import numpy as np
import pytest

from experiments.overoptimization.curves import best_of_n, best_of_n_kl


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


def test_the_estimate_is_unbiased_over_all_pools_of_a_small_alphabet():
    """Pools of 4 samples of a policy with 3 completions; exact: p(best = i) = F_i^n - F_{i-1}^n."""
    probabilities, rewards = np.array([0.5, 0.3, 0.2]), np.array([1.0, 2.0, 3.0])
    values = np.array([0.2, 1.0, -0.4])  # gold falls where the proxy is largest
    for size in (1, 2, 3, 4):
        expected = 0.0
        for pool in product(range(3), repeat=4):
            drawn = list(pool)
            estimate = best_of_n([rewards[drawn]], [values[drawn]], [size])[0, 0]
            expected += probabilities[drawn].prod() * estimate
        exact = best_distribution(probabilities, size) @ values
        assert expected == pytest.approx(exact, abs=1e-12)


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
