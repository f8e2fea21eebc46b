"""Intervals and preference accuracy agree with definitions, other libraries and simulation.

Two systems are compared on the same pairs as statsmodels does, and honestly: the test keeps its
level, the interval covers a known difference, and pairing makes it narrower. About
`common.evaluation.intervals` and `common.evaluation.accuracy`.
"""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from common.evaluation.accuracy import Interval, outcomes, preference_accuracy, wilson_interval
from common.evaluation.intervals import (
    bootstrap_means,
    mean_interval,
    percentile_interval,
)
from common.evaluation.summary import mcnemar_p_value, paired_differences
from common.report.tables import ends_cell, interval_cell


def test_no_interval_leaves_out_what_it_is_of() -> None:
    """At 0 and at `total` rounding put 213 and 933 of these ends on the wrong side of the share."""
    for total in range(1, 3001):
        for successes in (0, total):
            low, high = wilson_interval(successes, total)
            assert 0 <= low <= successes / total <= high <= 1, total
    for values in ([0.1] * 3, [1 / 3] * 7, [0.7, 0.7, 0.7 + 1e-16], [2.5]):
        mean, low, high = mean_interval(values)
        assert low <= mean <= high


def test_of_nothing_there_are_no_statistics() -> None:
    with pytest.raises(AssertionError, match="statistics of nothing"):
        mean_interval([])
    with pytest.raises(AssertionError, match="an interval needs trials"):
        wilson_interval(0, 0)


def test_scores_may_come_with_a_graph_and_in_bfloat16() -> None:
    values = torch.tensor([1.0, 2.5, 4.0])
    with_graph = values.bfloat16().requires_grad_()
    assert mean_interval(with_graph) == mean_interval(values) == mean_interval(values.tolist())


def test_preference_accuracy_counts_a_tie_as_one_half() -> None:
    chosen = torch.tensor([2.0, 1.0, 0.5, 3.0, -1.0])
    rejected = torch.tensor([1.0, 1.0, 0.7, 3.0, -2.0])
    result = preference_accuracy(outcomes(chosen, rejected))  # 2 wins, 2 ties, 1 loss
    assert result.accuracy == pytest.approx(3 / 5)
    assert (result.num_pairs, result.num_ties) == (5, 2)
    assert (result.low, result.high) == wilson_interval(3, 5)
    assert (result.num_prompts, result.over_prompts.low) == (0, None)  # no prompts were passed
    assert Interval(0.5, 0.4, 0.6).count == 0


def test_bfloat16_scores_tie_only_where_they_are_equal() -> None:
    chosen = torch.tensor([1.0, 1.001], dtype=torch.bfloat16)  # 1.001 rounds to 1
    result = preference_accuracy(outcomes(chosen, torch.ones(2, dtype=torch.bfloat16)))
    assert (result.accuracy, result.num_ties) == (0.5, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(RuntimeError, match="1 of 2 values are not finite"):
        outcomes([1.0, bad], [0.0, 0.0])
    with pytest.raises(RuntimeError, match="1 of 2 values are not finite"):
        mean_interval([1.0, bad])


def test_bootstrap_agrees_with_all_resamples_enumerated() -> None:
    values = [0.0, 1.0, 2.0, 5.0, 9.0]
    every = sorted(np.mean(draw) for draw in itertools.product(values, repeat=5))  # 3125 resamples
    mean, low, high = mean_interval(values)
    assert mean == pytest.approx(3.4)
    # With 2000 draws the share below an end has a standard error of sqrt(.025 * .975 / 2000).
    for end, share in ((low, 0.025), (high, 0.975)):
        below = np.searchsorted(every, end - 1e-9, side="left") / len(every)
        up_to = np.searchsorted(every, end + 1e-9, side="right") / len(every)
        assert below - 0.011 <= share <= up_to + 0.011


def test_bootstrap_depends_on_the_values_only() -> None:
    values = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])
    assert mean_interval(values) == mean_interval(values.flip(0)) == mean_interval(values.tolist())
    assert mean_interval([2.5]) == (2.5, 2.5, 2.5)


# ---- pairs of the same prompt --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "total"),
    [(0, 7), (3, 7), (0.5, 30), (12.5, 30), (30, 30), (81, 263), (86_000, 86_086)],
)
def test_wilson_interval_is_that_of_statsmodels(successes: float, total: int) -> None:
    alpha = 2 * scipy.stats.norm.sf(1.96)  # our z
    expected = proportion_confint(successes, total, alpha=alpha, method="wilson")
    assert wilson_interval(successes, total) == pytest.approx(expected)


def test_resamples_of_single_clusters_are_those_of_the_observations() -> None:
    values = np.array([[0.0, 1.0], [1.0, 3.0], [2.0, 5.0]])
    means = bootstrap_means(values, np.arange(3))
    assert means[:, 1] == pytest.approx(1 + 2 * means[:, 0])  # the columns share the draws
    assert set(np.round(3 * means[:, 0])) == set(range(7))
    weighted = bootstrap_means(values[[0, 0, 1]], np.array([0, 0, 1]))[:, 0]
    assert np.unique(weighted.round(6)) == pytest.approx([0, 1 / 3, 1])  # sizes 2 and 1


def test_an_interval_is_shown_with_what_is_known_of_it() -> None:
    whole, alone = Interval(0.5, 0.4, 0.6), Interval(0.5, None, None)
    assert interval_cell(whole, 100, 1) == "50.0 [40.0, 60.0]"
    assert ends_cell(whole, 100, 1) == "[40.0, 60.0]"
    assert interval_cell(alone, 100, 1) == "50.0"
    assert ends_cell(alone, 100, 1) == "\N{EN DASH}"
    assert interval_cell(None, 1, 2) == "\N{EN DASH}"
    assert interval_cell(Interval(-0.0, -1.0, 2.0), 1, 1, sign="+") == "+0.0 [-1.0, +2.0]"


# ---- two systems on the same pairs ---------------------------------------------------------------


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
    is_drawn_anew = generator.random(clusters.size) < 0.2
    first = np.where(is_drawn_anew, generator.random(clusters.size) < easy, second)
    first = first | (~first & (generator.random(clusters.size) < gain / 0.4))
    return {"first": first.astype(float), "second": second.astype(float)}, clusters


@pytest.mark.usefixtures("few_resamples")
def test_the_paired_interval_covers_the_truth_and_is_narrower_than_an_unpaired_one() -> None:
    generator = np.random.default_rng(0)
    covered, paired, unpaired = 0, [], []
    for _ in range(120):
        wins, clusters = simulated(generator, 60, 8, 0.04)
        (found,) = paired_differences(wins, clusters)
        covered += found.low <= 0.04 <= found.high
        paired.append(found.high - found.low)
        squares = 0.0
        for values in wins.values():
            means = bootstrap_means(values[:, None], clusters)[:, 0]
            low, high = percentile_interval(means, values.mean())
            squares += (high - low) ** 2
        unpaired.append(math.sqrt(squares))
    assert 0.88 <= covered / 120 <= 0.99
    assert np.mean(paired) < 0.6 * np.mean(unpaired)


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 9])
def test_a_few_prompts_have_no_interval(num_prompts: int) -> None:
    """However many pairs they have: one prompt's pairs may all be right by one stroke of luck."""
    clusters = np.repeat(np.arange(num_prompts), 50)
    wins = {"a": np.ones(clusters.size), "b": np.zeros(clusters.size)}
    (found,) = paired_differences(wins, clusters)
    assert (found.low, found.high) == (None, None)
    assert found.p_value < 1e-10


def test_ties_favour_whoever_counts_more() -> None:
    wins = {
        "a": np.array([1.0, 0.5, 0.5, 0.0, 1.0, 0.5]),
        "b": np.array([0.5, 0.0, 0.5, 0.5, 1.0, 1.0]),
    }
    (found,) = paired_differences(wins, np.arange(6))
    assert (found.first, found.second) == ("a", "b")
    assert (found.num_first_better, found.num_second_better) == (2, 2)
    assert (found.difference, found.p_value) == (0, 1)


def test_every_two_systems_are_compared_once_with_the_sign_of_the_first() -> None:
    generator = np.random.default_rng(2)
    wins = {
        name: (generator.random(400) < share) * 1.0
        for name, share in {"a": 0.9, "b": 0.6, "c": 0.5}.items()
    }
    found = paired_differences(wins, np.arange(400))
    assert [(d.first, d.second) for d in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    for d in found:
        assert d.difference == pytest.approx(wins[d.first].mean() - wins[d.second].mean())
        assert d.low < d.difference < d.high
    assert found[0].low > 0
    assert found[0].num_first_better > found[0].num_second_better
    assert paired_differences({"a": wins["a"]}, np.arange(400)) == []
