"""Every system compared on the same pairs: accuracy, differences, splits, calibration.

All from a `PairScores` alone, so that `scores.jsonl` gives every number again:

    comparison.compare(pair_scores.read_scores(Path("output/eval/scores.jsonl")))
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.evaluation.calibration import calibration
from common.evaluation.intervals import (
    bootstrap_means,
    cluster_numbers,
    outcomes,
    preference_accuracy,
)
from common.evaluation.pair_scores import PairScores
from common.evaluation.paired_statistics import paired_differences, prompt_interval

ABOUT_EQUAL = 0.1  # of the longer completion's tokens
NOT_GIVEN = "not given"
STEPS = ((1, 3), (4, 6), (7, 9))  # of the nine steps of confidence of Stiennon et al. 2020


def compare(table: PairScores) -> dict[str, Any]:
    """What `results.json` holds under `comparison`.

    Returns:
        num_pairs, num_prompts; systems: name, accuracy (as `PreferenceAccuracy`, with num_prompts,
        prompt_low and prompt_high, the 95% interval of the bootstrap over prompts, None below
        `MIN_PROMPTS` of them) and accuracy_by (split, part: the same); differences: as
        `PairedDifference`, of every two systems; calibration: by system that gives log odds, as
        `Calibration`.
    """
    clusters = cluster_numbers([pair["prompt_sha256"] for pair in table.pairs])  # (N,)
    wins = {name: outcomes(*scores.T) for name, scores in table.systems.items()}
    whole = accuracies(table, np.arange(len(table.pairs)))
    by_part: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in wins}
    for split, labels in splits(table.pairs).items():
        for part in sorted(set(labels), key=part_order):
            rows = np.flatnonzero([label == part for label in labels])
            for name, accuracy in accuracies(table, rows).items():
                by_part[name].setdefault(split, {})[part] = accuracy
    return {
        "num_pairs": len(table.pairs),
        "num_prompts": int(clusters.max()) + 1,
        "systems": [
            {"name": name, "accuracy": whole[name], "accuracy_by": by_part[name]} for name in wins
        ],
        "differences": [asdict(d) for d in paired_differences(wins, clusters)],
        "calibration": {
            name: asdict(calibration(scores[:, 0] - scores[:, 1]))
            for name, scores in table.rewards.items()
        },
    }


def accuracies(table: PairScores, rows: NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Accuracy on some of the pairs by system, with both intervals."""
    clusters = cluster_numbers([table.pairs[row]["prompt_sha256"] for row in rows])
    num_prompts = int(clusters.max()) + 1
    columns = [outcomes(*scores[rows].T) for scores in table.systems.values()]
    means = bootstrap_means(np.stack(columns, axis=1), clusters)  # (R, S)
    found = {}
    for (name, scores), column in zip(table.systems.items(), means.T, strict=True):
        accuracy = asdict(preference_accuracy(*scores[rows].T))
        low, high = prompt_interval(column, accuracy["accuracy"], num_prompts)
        found[name] = accuracy | {
            "num_prompts": num_prompts,
            "prompt_low": low,
            "prompt_high": high,
        }
    return found


# ---- splits: one label a pair --------------------------------------------------------------------


def splits(pairs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The splits that the pairs allow, each as a label (N,); one of a single part says nothing."""
    labels = {
        "source": [pair["source"] for pair in pairs],
        "confidence": in_bins([pair["confidence"] for pair in pairs]),
        "margin": in_bins([pair["margin"] for pair in pairs]),
        "label certainty": in_bins([certainty(pair["label_probability"]) for pair in pairs]),
        "length": [length_label(pair["chosen_tokens"], pair["rejected_tokens"]) for pair in pairs],
    }
    return {name: parts for name, parts in labels.items() if len(set(parts)) > 1}


def part_order(label: str) -> tuple[float, str]:
    """Sorts bins by their lower ends, and behind them what is no bin."""
    start = re.match(r"-?[\d.]+(e[-+]\d+)?", label)
    return float(start[0]) if start else np.inf, label


def certainty(probability: float | None) -> float | None:
    """How sure the label of a pair is, in [1/2, 1]: the accuracy of a judge that knows it all."""
    return None if probability is None else max(probability, 1 - probability)


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
    if known.size == 0:
        return [NOT_GIVEN] * len(values)
    if np.isin(known, np.arange(1, 10)).all():
        return [step_label(value) for value in values]
    edges = np.unique(np.quantile(known, (0, 1 / 3, 2 / 3, 1)))
    return [NOT_GIVEN if value is None else bin_label(value, edges) for value in values]


def step_label(value: float | None) -> str:
    """The label of a step of confidence."""
    fitting = (f"{low}-{high}" for low, high in STEPS if value is not None and low <= value <= high)
    return next(fitting, NOT_GIVEN)


def bin_label(value: float, edges: NDArray[np.float64]) -> str:
    """The label of the bin that a value is in, between two of the edges."""
    place = max(1, min(int(np.searchsorted(edges, value, side="right")), edges.size - 1))
    low, high = edges[place - 1], edges[min(place, edges.size - 1)]
    return f"{low:.3g} to {high:.3g}"
