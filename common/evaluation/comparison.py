"""Every system compared on the same pairs: accuracy, differences, splits, calibration.

All from a `PairScores` alone, so that `scores.jsonl` gives every number again:

    comparison.compare(pair_scores.read_scores(Path("output/eval/scores.jsonl")))

Two systems meet the same easy and hard pairs, so their difference is known better than either
accuracy: two intervals that overlap say little, the interval of the difference says it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.evaluation import intervals
from common.evaluation.intervals import MIN_PROMPTS, Floats, Numbers
from common.evaluation.pair_scores import PairScores

NUM_BINS = 15  # of equal width, as in Guo et al. 2017, section 2; odd: a bin around 1/2
NUM_SIMULATIONS = 200
ABOUT_EQUAL = 0.1  # of the longer completion's tokens
NOT_GIVEN = "not given"
STEPS = ("1-3", "4-6", "7-9")  # of the nine steps of confidence of Stiennon et al. 2020


def compare(table: PairScores) -> dict[str, Any]:
    """What `results.json` holds under `comparison`.

    Returns:
        num_pairs, num_prompts; systems: name, accuracy (as `PreferenceAccuracy`, with num_prompts,
        prompt_low and prompt_high, the 95% interval of the bootstrap over prompts, None below
        `MIN_PROMPTS` of them) and accuracy_by (split, part: the same); differences: as
        `paired_differences`; calibration: by system that gives log odds, as `calibration`.
    """
    clusters = intervals.cluster_numbers([pair["prompt_sha256"] for pair in table.pairs])  # (N,)
    wins = {name: intervals.outcomes(*scores.T) for name, scores in table.systems.items()}
    systems: dict[str, dict[str, Any]] = {
        name: {"name": name, "accuracy": accuracy, "accuracy_by": {}}
        for name, accuracy in accuracies(wins, clusters).items()
    }
    for split, labels in splits(table.pairs).items():
        for part in sorted(set(labels), key=part_order):
            rows = np.flatnonzero([label == part for label in labels])
            own = {name: counts[rows] for name, counts in wins.items()}
            own_clusters = intervals.cluster_numbers(clusters[rows].tolist())
            for name, accuracy in accuracies(own, own_clusters).items():
                systems[name]["accuracy_by"].setdefault(split, {})[part] = accuracy
    return {
        "num_pairs": len(table.pairs),
        "num_prompts": int(clusters.max()) + 1,
        "systems": list(systems.values()),
        "differences": paired_differences(wins, clusters),
        "calibration": {
            name: calibration(scores[:, 0] - scores[:, 1]) for name, scores in table.rewards.items()
        },
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


# ---- two systems on the same pairs ---------------------------------------------------------------


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
        several pairs that are alike; prompt_p_value: of the permutation test over prompts, above
        0.05 with 5 prompts or fewer.
    """
    if len(wins) < 2:
        return []
    columns = np.stack(list(wins.values()), axis=1)  # (N, S)
    means = intervals.bootstrap_means(columns, clusters)  # (R, S)
    sums = intervals.cluster_sums(columns, clusters)  # (G, S)
    flipped = sign_flips(sums)  # (R, S)
    found = []
    for (i, first), (j, second) in combinations(enumerate(wins), 2):
        gains = columns[:, i] - columns[:, j]  # (N,)
        better, worse = int((gains > 0).sum()), int((gains < 0).sum())
        gain = float(gains.mean())
        low, high = prompt_interval(means[:, i] - means[:, j], gain, len(sums))
        by_chance = np.abs(flipped[:, i] - flipped[:, j])  # (R,)
        num_as_far = int((by_chance >= abs(gains.sum())).sum())  # exact: multiples of 1/2
        found.append(
            {
                "first": first,
                "second": second,
                "difference": gain,
                "low": low,
                "high": high,
                "num_first_better": better,
                "num_second_better": worse,
                "p_value": mcnemar_p_value(better, worse),
                "prompt_p_value": (1 + num_as_far) / (1 + len(flipped)),
            }
        )
    return found


def mcnemar_p_value(num_first_better: int, num_second_better: int) -> float:
    """Exact two-sided p-value of McNemar's test on discordant pairs (Agresti 2013, section 11.1).

    Under the null a discordant pair favours either system with probability 1/2.
    """
    from scipy.stats import binomtest

    total = num_first_better + num_second_better
    return float(binomtest(num_first_better, total).pvalue) if total else 1.0


def sign_flips(sums: Floats) -> Floats:
    """Random signs of the clusters, summed.

    Were two systems equally good, either might have had the other's wins on all pairs of a prompt:
    that swap turns the sign of the prompt's difference (Good 2005, section 3.2, matched pairs). The
    columns share the signs, so that the difference of two columns is that of the two systems.

    Args:
        sums: (G, S) of each cluster.

    Returns:
        (NUM_RESAMPLES, S), the same in every process.
    """
    generator = np.random.default_rng(intervals.BOOTSTRAP_SEED)
    # One bit a cluster, and then to +-1: 2000 x G numbers may not fit in memory.
    bits = generator.integers(0, 2, (intervals.NUM_RESAMPLES, len(sums)), dtype=np.int8)
    return np.array([(2.0 * row - 1.0) @ sums for row in bits])


# ---- splits: one label a pair --------------------------------------------------------------------


def splits(pairs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The splits that the pairs allow, each as a label (N,); one of a single part says nothing."""
    odds = [pair["label_probability"] for pair in pairs]
    certainties = [None if p is None else max(p, 1 - p) for p in odds]
    labels = {
        "source": [pair["source"] for pair in pairs],
        "confidence": in_bins([pair["confidence"] for pair in pairs]),
        "margin": in_bins([pair["margin"] for pair in pairs]),
        "label certainty": in_bins(certainties),  # the accuracy of a judge that knows it all
        "length": [length_label(pair["chosen_tokens"], pair["rejected_tokens"]) for pair in pairs],
    }
    return {name: parts for name, parts in labels.items() if len(set(parts)) > 1}


def part_order(label: str) -> tuple[float, str]:
    """Sorts bins by their lower ends, and behind them what is no bin."""
    start = re.match(r"-?[\d.]+(e[-+]\d+)?", label)
    return float(start[0]) if start else np.inf, label


def length_label(chosen: int, rejected: int) -> str:
    """Which completion has more tokens; about equal: within 10% of the longer one's."""
    if abs(chosen - rejected) <= ABOUT_EQUAL * max(chosen, rejected):
        return "about equal"
    return "chosen longer" if chosen > rejected else "chosen shorter"


def in_bins(values: Sequence[float | None]) -> list[str]:
    """Labels of numbers: whole numbers from 1 to 9 as `STEPS`, others by thirds of the values.

    A bin takes in its lower end, the last one both; equal values are in the same bin.
    """
    known = np.array([value for value in values if value is not None])
    if np.isin(known, np.arange(1, 10)).all():
        return [NOT_GIVEN if value is None else STEPS[int(value - 1) // 3] for value in values]
    edges = np.unique(np.quantile(known, (0, 1 / 3, 2 / 3, 1)))

    def label(value: float) -> str:
        place = int(np.searchsorted(edges[1:-1], value, side="right"))
        return f"{edges[place]:.3g} to {edges[min(place + 1, edges.size - 1)]:.3g}"

    return [NOT_GIVEN if value is None else label(value) for value in values]


# ---- calibration ---------------------------------------------------------------------------------


def calibration(margins: Floats) -> dict[str, Any]:
    """Whether sigma(r_chosen - r_rejected) is the share of pairs that are preferred that way.

    The labels of a file of pairs all say "the first one", which a curve over them could not go
    through: each pair counts on both sides, once with probability p and the observation 1, once
    with 1 - p and the observation 0. The curve is therefore symmetric about (1/2, 1/2), and the
    middle bin is right by construction. Ties have p = 1/2.

    Args:
        margins: (N,) r_chosen - r_rejected, N at least 1: what the Bradley-Terry model takes the
            log odds of the label to be.

    Returns:
        ece: expected calibration error (Guo et al. 2017, eq. 3), mean |observed - predicted| over
        the bins, weighted by their counts; ece_by_chance: what it would be on average if every
        prediction were right, at this number of pairs; log_loss: mean -log sigma(margin), nats per
        pair, ln 2 for a coin; bins: NUM_BINS from 0 to 1, each with its count (over all bins 2N),
        mean predicted probability, share observed, and that one's 95% Wilson interval low, high;
        all None in an empty bin.
    """
    from scipy.special import expit

    p = expit(margins)  # (N,)
    generator = np.random.default_rng(intervals.BOOTSTRAP_SEED)
    labels = (generator.random(p.size) < p for _ in range(NUM_SIMULATIONS))
    sums = [binned(p, is_preferred) for is_preferred in (np.ones(p.size, dtype=bool), *labels)]
    ece, *by_chance = (float(np.abs(own[2] - own[1]).sum() / (2 * p.size)) for own in sums)
    bins: list[dict[str, Any]] = []
    for count, predicted, observed in zip(*sums[0].tolist(), strict=True):
        means: tuple[float | None, ...] = (None,) * 4
        if count:
            interval = intervals.wilson_interval(observed, count)
            means = (predicted / count, observed / count, *interval)
        names = ("predicted", "observed", "low", "high")
        bins.append({"count": int(count), **dict(zip(names, means, strict=True))})
    log_loss = float(np.logaddexp(0.0, -margins).mean())
    chance = float(np.mean(by_chance))
    return {"ece": ece, "ece_by_chance": chance, "log_loss": log_loss, "bins": bins}


def binned(p: Floats, is_preferred: NDArray[np.bool_]) -> Floats:
    """Both sides of each pair in equal bins.

    Args:
        p: (N,) predicted probability of one side.
        is_preferred: (N,) whether that side was preferred.

    Returns:
        Counts, sums of predicted probability, sums of preferred: (3, NUM_BINS).
    """
    places = np.minimum((p * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    # Mirrored and not computed of 1 - p, so that a p on an edge keeps the curve symmetric.
    places = np.concatenate([places, NUM_BINS - 1 - places])  # (2N,)
    predicted = np.concatenate([p, 1 - p])
    observed = np.concatenate([is_preferred, ~is_preferred])
    values = (np.ones(2 * p.size), predicted, observed)
    return np.stack([np.bincount(places, own, NUM_BINS) for own in values])
