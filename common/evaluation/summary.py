"""Results from records: accuracies and differences on pairs, means and pass rates of completions.

No model is needed: the two files of an evaluation give every number again,

    summary.compare(records.read_scores(Path("output/eval/scores.jsonl")))

Systems are compared on the same pairs, so the interval of their difference is narrower than those
of their accuracies: two systems with overlapping intervals may differ significantly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np

from common.evaluation import intervals
from common.evaluation.accuracy import Floats, outcomes, preference_accuracy
from common.evaluation.intervals import Numbers, mean_over_prompts, share_over_prompts
from common.evaluation.records import REFERENCE, PairScores, PromptRecord
from common.evaluation.runs import folder_of_run, run_cost
from common.text.overlap import distinct_share

MEANS = ("kl", "rouge_1", "rouge_2", "rouge_l")


# ---- pairs ---------------------------------------------------------------------------------------


def compare(table: PairScores) -> dict[str, Any]:
    """The entry `comparison` of `results.json`.

    Returns:
        num_pairs, num_prompts; systems: name, accuracy (as `PreferenceAccuracy`, with num_prompts,
        prompt_low and prompt_high, the 95% interval of the bootstrap over prompts, None below
        `MIN_PROMPTS` of them) and accuracy_by (source: of each source the same; empty where all
        pairs have one source); differences: as `paired_differences`.
    """
    clusters = intervals.cluster_numbers([pair["prompt_sha256"] for pair in table.pairs])  # (N,)
    wins = {name: outcomes(*scores.T) for name, scores in table.scores.items()}
    sources = np.array([pair["source"] for pair in table.pairs])
    by_source: dict[str, dict[str, Any]] = {}
    if len(set(sources)) > 1:
        for source in sorted(set(sources.tolist())):
            rows = sources == source
            row_clusters = intervals.cluster_numbers(clusters[rows].tolist())
            row_wins = {name: counts[rows] for name, counts in wins.items()}
            by_source[source] = accuracies(row_wins, row_clusters)
    return {
        "num_pairs": len(table.pairs),
        "num_prompts": int(clusters.max()) + 1,
        "systems": [
            {
                "name": name,
                "accuracy": accuracy,
                "accuracy_by": by_source
                and {"source": {source: each[name] for source, each in by_source.items()}},
            }
            for name, accuracy in accuracies(wins, clusters).items()
        ],
        "differences": paired_differences(wins, clusters),
    }


def accuracies(wins: Mapping[str, Floats], clusters: Numbers) -> dict[str, dict[str, Any]]:
    """Accuracy by system, with both intervals; wins and clusters as in `paired_differences`."""
    num_prompts = int(clusters.max()) + 1
    means = intervals.bootstrap_means(np.stack(list(wins.values()), axis=1), clusters)  # (R, S)
    by_system = {}
    for (name, counts), column in zip(wins.items(), means.T, strict=True):
        accuracy = asdict(preference_accuracy(counts))
        low, high = prompt_interval(column, accuracy["accuracy"], num_prompts)
        over_prompts = {"num_prompts": num_prompts, "prompt_low": low, "prompt_high": high}
        by_system[name] = accuracy | over_prompts
    return by_system


def prompt_interval(
    means: Floats, estimate: float, num_prompts: int
) -> tuple[float, float] | tuple[None, None]:
    """The interval of bootstrap means (R,) over prompts, None with too few prompts."""
    if num_prompts < intervals.MIN_PROMPTS:
        return None, None
    return intervals.percentile_interval(means, estimate)


def paired_differences(wins: Mapping[str, Floats], clusters: Numbers) -> list[dict[str, Any]]:
    """Differences between every two systems, earlier minus later ones.

    A pair is discordant if it counts more for one system (a tie counts one half). p-values are not
    corrected for the number of comparisons. `wins` has the outcomes (N,) of each system on the same
    pairs, `clusters` (N,) is as in `bootstrap_means`.

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


# ---- completions ---------------------------------------------------------------------------------


def summarise(records: Sequence[PromptRecord], name: str) -> dict[str, Any] | None:
    """Means over the completions of a system, or REFERENCE; None without any.

    Returns:
        `length` (tokens) and `stop_rate` as numbers, and with intervals as `length_interval` and
        `stop_rate_interval`; `rewards` by judge if there is any, `entropy` (nats per token, mean
        over tokens) and the MEANS as intervals, None where nothing was measured;
        `distinct_completions`, a share; `pass_rates` by judge that only says 0 or 1, if there is
        any, as `pass_rates.pass_rates`.
    """
    check_judges = checks(records)
    records = [record for record in records if record.of(name)]
    if not records:
        return None
    prompts = [record.prompt for record in records for _ in record.all_of(name)]
    generations = [generation for record in records for generation in record.all_of(name)]
    passed = {judge: check_rates(records, name, judge) for judge in check_judges}
    lengths = [generation.num_tokens for generation in generations]
    length = mean_over_prompts(lengths, prompts)
    stop_rate = share_over_prompts(
        [float(generation.stopped) for generation in generations], prompts
    )
    assert length
    assert stop_rate
    judges = dict.fromkeys(judge for g in generations for judge in g.rewards)
    rewards = {}
    for judge in judges:
        over = share_over_prompts if judge in passed else mean_over_prompts  # as its pass@1
        rewards[judge] = over([g.rewards.get(judge) for g in generations], prompts)
    return {
        "length": length["mean"],
        "length_interval": length,
        "stop_rate": stop_rate["mean"],
        "stop_rate_interval": stop_rate,
        "entropy": mean_over_prompts([g.entropy for g in generations], prompts, lengths),
        "distinct_completions": distinct_share([g.completion for g in generations]),
        **({"rewards": rewards} if rewards else {}),
        **({"pass_rates": passed} if passed else {}),
        **{
            key: mean_over_prompts([getattr(g, key) for g in generations], prompts) for key in MEANS
        },
    }


def checks(records: Sequence[PromptRecord]) -> list[str]:
    """Judges whose rewards are all 0 or 1."""
    named = ((record, name) for record in records for name in (*record.systems, REFERENCE))
    rewards = [generation.rewards for record, name in named for generation in record.all_of(name)]
    judges = dict.fromkeys(judge for each in rewards for judge in each)
    values = {judge: {each.get(judge) for each in rewards} - {None} for judge in judges}
    return [judge for judge in judges if values[judge] and values[judge] <= {0, 1}]


def check_rates(records: Sequence[PromptRecord], name: str, judge: str) -> dict[str, Any]:
    """Pass rates of a system's completions by a check."""
    from common.evaluation.pass_rates import pass_rates

    samples = [record.all_of(name) for record in records]
    votes = [[g.answers.get(judge) for g in generations] for generations in samples]
    has_votes = any(judge in g.answers for generations in samples for g in generations)
    rewards = [[g.rewards.get(judge) for g in generations] for generations in samples]
    prompts = [record.prompt for record in records]
    return pass_rates(rewards, votes if has_votes else None, prompts)


# ---- systems -------------------------------------------------------------------------------------


def describe_system(
    path: str,
    score_name: str,
    names: Mapping[str, str],
    reward_models: Sequence[str],
    comparison: Mapping[str, Any] | None,
    prompt_records: Sequence[PromptRecord],
) -> dict[str, Any]:
    """A system's row: accuracy on all pairs, the cost of its run, its generations.

    `gold_reward` and `reward` are two of the `rewards`: of the function `gold`, and of the first
    reward model. `names` has the names of systems and judges by path, `reward_models` paths. The
    accuracy is that of `score_name` in the comparison, if there are pairs.
    """
    name = names[path]
    compared = {row["name"]: row["accuracy"] for row in (comparison or {}).get("systems", [])}
    cost = run_cost(*folder_of_run(path))
    system: dict[str, Any] = {
        "name": name,
        "kind": "reward_model" if path in reward_models else "policy",
        "path": path,
        "scored_by": score_name.removeprefix(name).replace("_", " ").strip() or "reward",
        "accuracy": compared.get(score_name),
        "minutes": cost.get("elapsed_minutes"),
        "peak_memory_gb": cost.get("peak_memory_gb"),
        **(summarise(prompt_records, name) or {}),
    }
    if rewards := system.get("rewards"):
        system["gold_reward"] = rewards.get(names.get("gold", ""))
        system["reward"] = rewards.get(names[reward_models[0]]) if reward_models else None
    return system


def attainable_accuracy(pairs: Sequence[Mapping[str, Any]]) -> float | None:
    """Expected accuracy of a judge that knows the odds of each label: mean max(p, 1 - p).

    A label is one draw, so no judge can expect more. None unless all pairs have the probability of
    their labels.
    """
    chances = [pair["label_probability"] for pair in pairs]
    has_chances = chances and all(type(x) in (int, float) and 0 <= x <= 1 for x in chances)
    return sum(max(x, 1 - x) for x in chances) / len(chances) if has_chances else None
