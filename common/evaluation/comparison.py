"""Every system compared on the same pairs: accuracy, by source too, and differences.

All from a `PairScores` alone, so that `scores.jsonl` gives every number again:

    comparison.compare(pair_scores.read_scores(Path("output/eval/scores.jsonl")))

Two systems meet the same easy and hard pairs, so their difference is known better than either
accuracy: two intervals that overlap say little, the interval of the difference says it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np

from common.evaluation import intervals
from common.evaluation.intervals import MIN_PROMPTS, Floats, Numbers
from common.evaluation.pair_scores import PairScores


def compare(table: PairScores) -> dict[str, Any]:
    """The entry `comparison` of `results.json`.

    Returns:
        num_pairs, num_prompts; systems: name, accuracy (as `PreferenceAccuracy`, with num_prompts,
        prompt_low and prompt_high, the 95% interval of the bootstrap over prompts, None below
        `MIN_PROMPTS` of them) and accuracy_by (source: of each source the same; empty where all
        pairs have one source); differences: as `paired_differences`.
    """
    clusters = intervals.cluster_numbers([pair["prompt_sha256"] for pair in table.pairs])  # (N,)
    wins = {name: intervals.outcomes(*scores.T) for name, scores in table.scores.items()}
    systems: dict[str, dict[str, Any]] = {
        name: {"name": name, "accuracy": accuracy, "accuracy_by": {}}
        for name, accuracy in accuracies(wins, clusters).items()
    }
    sources = np.array([pair["source"] for pair in table.pairs])
    different = sorted(set(sources.tolist()))
    for source in different if len(different) > 1 else []:
        rows = np.flatnonzero(sources == source)
        of_rows = {name: counts[rows] for name, counts in wins.items()}
        row_clusters = intervals.cluster_numbers(clusters[rows].tolist())
        for name, accuracy in accuracies(of_rows, row_clusters).items():
            systems[name]["accuracy_by"].setdefault("source", {})[source] = accuracy
    return {
        "num_pairs": len(table.pairs),
        "num_prompts": int(clusters.max()) + 1,
        "systems": list(systems.values()),
        "differences": paired_differences(wins, clusters),
    }


def accuracies(wins: Mapping[str, Floats], clusters: Numbers) -> dict[str, dict[str, Any]]:
    """Accuracy by system, with both intervals; wins and clusters as in `paired_differences`."""
    num_prompts = int(clusters.max()) + 1
    means = intervals.bootstrap_means(np.stack(list(wins.values()), axis=1), clusters)  # (R, S)
    found = {}
    for (name, counts), column in zip(wins.items(), means.T, strict=True):
        accuracy = asdict(intervals.accuracy_of(counts))
        low, high = prompt_interval(column, accuracy["accuracy"], num_prompts)
        over_prompts = {"num_prompts": num_prompts, "prompt_low": low, "prompt_high": high}
        found[name] = accuracy | over_prompts
    return found


def prompt_interval(
    means: Floats, estimate: float, num_prompts: int
) -> tuple[float, float] | tuple[None, None]:
    """The interval of bootstrap means (R,) over prompts, none where they are too few."""
    if num_prompts < MIN_PROMPTS:
        return None, None
    return intervals.percentile_interval(means, estimate)


def paired_differences(wins: Mapping[str, Floats], clusters: Numbers) -> list[dict[str, Any]]:
    """Every two systems compared, those named first with those behind them.

    A pair is discordant if it counts more for one system: with a tie of one of them the other's win
    or loss decides, by one half. p-values are not corrected for the number of comparisons.

    Args:
        wins: (N,) outcomes of each system on the same pairs.
        clusters: (N,) which pairs belong together, as in `bootstrap_means`.

    Returns:
        first, second: names; difference: of their accuracies, in [-1, 1]; low, high: its 95% paired
        bootstrap interval over prompts, None below `MIN_PROMPTS` of them; num_first_better,
        num_second_better: discordant pairs; p_value: McNemar's, too small where a prompt has
        several pairs that are alike.
    """
    columns = np.stack(list(wins.values()), axis=1)  # (N, S)
    means = intervals.bootstrap_means(columns, clusters)  # (R, S)
    differences = []
    for (i, first), (j, second) in combinations(enumerate(wins), 2):
        gains = columns[:, i] - columns[:, j]  # (N,)
        better, worse = int((gains > 0).sum()), int((gains < 0).sum())
        gain = float(gains.mean())
        low, high = prompt_interval(means[:, i] - means[:, j], gain, int(clusters.max()) + 1)
        differences.append(
            {
                "first": first,
                "second": second,
                "difference": gain,
                "low": low,
                "high": high,
                "num_first_better": better,
                "num_second_better": worse,
                "p_value": mcnemar_p_value(better, worse),
            }
        )
    return differences


def mcnemar_p_value(num_first_better: int, num_second_better: int) -> float:
    """Exact two-sided p-value of McNemar's test on discordant pairs (Agresti 2013, section 11.1).

    Under the null a discordant pair favours either system with probability 1/2.
    """
    from scipy.stats import binomtest

    total = num_first_better + num_second_better
    return float(binomtest(num_first_better, total).pvalue) if total else 1.0
