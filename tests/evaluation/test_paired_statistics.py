"""Claim: two systems are compared on the same pairs as statsmodels does, and honestly.

The test keeps its level, the interval covers a known difference, and pairing makes it narrower.
"""

import math

import numpy as np
import pytest
from statsmodels.stats.contingency_tables import mcnemar

from common.evaluation.intervals import bootstrap_means, percentile_interval
from common.evaluation.summary import mcnemar_p_value, paired_differences


@pytest.mark.parametrize(
    ("better", "worse"), [(0, 0), (1, 0), (5, 5), (3, 9), (40, 12), (900, 100)]
)
def test_p_values_are_those_of_the_exact_test(better: int, worse: int) -> None:
    p = mcnemar_p_value(better, worse)
    assert p == mcnemar_p_value(worse, better)
    table = [[17, better], [worse, 4]]
    assert p == pytest.approx(mcnemar(table, exact=True).pvalue if better else 1, rel=1e-8)


def simulated(
    generator: np.random.Generator, num_clusters: int, size: int, gain: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Two systems that find the same pairs hard, the first by `gain` better; the truth is `gain`.

    Pairs of a cluster are alike: of one difficulty, from 0.3 to 0.9.
    """
    clusters = np.repeat(np.arange(num_clusters), size)
    easy = generator.uniform(0.3, 0.9, num_clusters)[clusters]
    luck = generator.random(clusters.size)  # shared by both systems
    second = luck < easy
    own = generator.random(clusters.size)
    first = np.where(own < 0.2, generator.random(clusters.size) < easy, second)
    first = first | (~first & (generator.random(clusters.size) < gain / 0.4))
    return {"first": first.astype(float), "second": second.astype(float)}, clusters


@pytest.mark.usefixtures("few_resamples")
def test_the_paired_interval_covers_the_truth_and_is_narrower_than_an_unpaired_one() -> None:
    generator = np.random.default_rng(0)
    covered, paired, unpaired = 0, [], []
    for _ in range(120):
        wins, clusters = simulated(generator, 60, 8, 0.04)
        (found,) = paired_differences(wins, clusters)
        covered += found["low"] <= 0.04 <= found["high"]
        paired.append(found["high"] - found["low"])
        squares = 0.0
        for values in wins.values():
            means = bootstrap_means(values[:, None], clusters)[:, 0]
            low, high = percentile_interval(means, values.mean())
            squares += (high - low) ** 2
        unpaired.append(math.sqrt(squares))
    assert 0.88 <= covered / 120 <= 0.99
    assert np.mean(paired) < 0.6 * np.mean(unpaired)


def test_equal_systems_differ_significantly_about_once_in_20_times() -> None:
    generator = np.random.default_rng(1)
    p_values = []
    for _ in range(2000):
        wins, _ = simulated(generator, 300, 1, 0.0)
        gains = wins["first"] - wins["second"]
        p_values.append(mcnemar_p_value(int((gains > 0).sum()), int((gains < 0).sum())))
    assert 0.02 <= np.mean(np.array(p_values) <= 0.05) <= 0.06  # exact: at most 0.05


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 9])
def test_a_few_prompts_have_no_interval(num_prompts: int) -> None:
    """However many pairs they have: one prompt's pairs may all be right by one stroke of luck."""
    clusters = np.repeat(np.arange(num_prompts), 50)
    wins = {"a": np.ones(clusters.size), "b": np.zeros(clusters.size)}
    (found,) = paired_differences(wins, clusters)
    assert (found["low"], found["high"]) == (None, None)
    assert found["p_value"] < 1e-10


def test_ties_favour_whoever_counts_more() -> None:
    wins = {
        "a": np.array([1.0, 0.5, 0.5, 0.0, 1.0, 0.5]),
        "b": np.array([0.5, 0.0, 0.5, 0.5, 1.0, 1.0]),
    }
    (found,) = paired_differences(wins, np.arange(6))
    assert (found["first"], found["second"]) == ("a", "b")
    assert (found["num_first_better"], found["num_second_better"]) == (2, 2)
    assert (found["difference"], found["p_value"]) == (0, 1)


def test_every_two_systems_are_compared_once_with_the_sign_of_the_first() -> None:
    generator = np.random.default_rng(2)
    wins = {
        name: (generator.random(400) < share) * 1.0
        for name, share in {"a": 0.9, "b": 0.6, "c": 0.5}.items()
    }
    found = paired_differences(wins, np.arange(400))
    assert [(d["first"], d["second"]) for d in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    for d in found:
        assert d["difference"] == pytest.approx(wins[d["first"]].mean() - wins[d["second"]].mean())
        assert d["low"] < d["difference"] < d["high"]
    assert found[0]["low"] > 0
    assert found[0]["num_first_better"] > found[0]["num_second_better"]
    assert paired_differences({"a": wins["a"]}, np.arange(400)) == []
