"""Results from records: accuracies and differences on pairs, means and pass rates of completions.

No model is needed: the two files of an evaluation give every number again,

    summary.compare(records.read_scores(Path("output/eval/scores.jsonl")))

Systems are compared on the same pairs, so the interval of their difference is narrower than those
of their accuracies: two systems with overlapping intervals may differ significantly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from common.evaluation import intervals
from common.evaluation.accuracy import (
    Floats,
    PreferenceAccuracy,
    outcomes,
    preference_accuracy,
)
from common.evaluation.intervals import Numbers, mean_over_prompts, share_over_prompts
from common.evaluation.pass_rates import pass_rates
from common.evaluation.records import REFERENCE, PairScores, PromptRecord
from common.evaluation.results import (
    ComparedScore,
    Comparison,
    Difference,
    GenerationSummary,
    Rates,
    System,
    score_name,
)
from common.evaluation.runs import folder_of_run, run_cost
from common.record.run_folder import read_training_config
from common.text.overlap import distinct_share

# ---- pairs ---------------------------------------------------------------------------------------


def compare(table: PairScores) -> Comparison:
    """All scores of a table on its pairs."""
    clusters = intervals.cluster_numbers([pair["prompt_sha256"] for pair in table.pairs])  # (N,)
    wins = {name: outcomes(*scores.T) for name, scores in table.scores.items()}
    sources = np.array([pair["source"] for pair in table.pairs])
    by_source: dict[str, dict[str, PreferenceAccuracy]] = {}
    if len(set(sources)) > 1:
        for source in sorted(set(sources.tolist())):
            rows = sources == source
            row_clusters = intervals.cluster_numbers(clusters[rows].tolist())
            row_wins = {name: counts[rows] for name, counts in wins.items()}
            by_source[source] = accuracies(row_wins, row_clusters)
    scores = []
    for name, accuracy in accuracies(wins, clusters).items():
        of_score = {source: each[name] for source, each in by_source.items()}
        scores.append(ComparedScore(name, accuracy, {"source": of_score} if of_score else {}))
    num_prompts = int(clusters.max()) + 1
    return Comparison(len(table.pairs), num_prompts, scores, paired_differences(wins, clusters))


def accuracies(wins: Mapping[str, Floats], clusters: Numbers) -> dict[str, PreferenceAccuracy]:
    """Accuracy by score, with both intervals; wins and clusters as in `paired_differences`."""
    num_prompts = int(clusters.max()) + 1
    means = intervals.bootstrap_means(np.stack(list(wins.values()), axis=1), clusters)  # (R, S)
    by_score = {}
    for (name, counts), column in zip(wins.items(), means.T, strict=True):
        accuracy = preference_accuracy(counts)
        low, high = prompt_interval(column, accuracy.accuracy, num_prompts)
        by_score[name] = replace(
            accuracy, num_prompts=num_prompts, prompt_low=low, prompt_high=high
        )
    return by_score


def prompt_interval(
    means: Floats, estimate: float, num_prompts: int
) -> tuple[float, float] | tuple[None, None]:
    """The interval of bootstrap means (R,) over prompts, None with too few prompts."""
    if num_prompts < intervals.MIN_PROMPTS:
        return None, None
    return intervals.percentile_interval(means, estimate)


def paired_differences(wins: Mapping[str, Floats], clusters: Numbers) -> list[Difference]:
    """Differences between every two scores, earlier minus later ones.

    A pair is discordant if it counts more for one of them (a tie counts one half). p-values are not
    corrected for the number of comparisons. `wins` has the outcomes (N,) of each on the same pairs,
    `clusters` (N,) is as in `bootstrap_means`.
    """
    columns = np.stack(list(wins.values()), axis=1)  # (N, S)
    means = intervals.bootstrap_means(columns, clusters)  # (R, S)
    num_prompts = int(clusters.max()) + 1
    differences = []
    for (i, first), (j, second) in combinations(enumerate(wins), 2):
        gains = columns[:, i] - columns[:, j]  # (N,)
        better, worse = int((gains > 0).sum()), int((gains < 0).sum())
        gain, p = float(gains.mean()), mcnemar_p_value(better, worse)
        low, high = prompt_interval(means[:, i] - means[:, j], gain, num_prompts)
        differences.append(Difference(first, second, gain, low, high, better, worse, p))
    return differences


def mcnemar_p_value(num_first_better: int, num_second_better: int) -> float:
    """Exact two-sided p-value of McNemar's test on discordant pairs (Agresti 2013, section 11.1).

    Under the null a discordant pair favours either system with probability 1/2.
    """
    from scipy.stats import binomtest

    total = num_first_better + num_second_better
    return float(binomtest(num_first_better, total).pvalue) if total else 1.0


# ---- completions ---------------------------------------------------------------------------------


def summarise(records: Sequence[PromptRecord], name: str) -> GenerationSummary | None:
    """Means over the completions of a system, or REFERENCE; None without any."""
    check_judges = checks(records)
    records = [record for record in records if record.of(name)]
    if not records:
        return None
    prompts = [record.prompt for record in records for _ in record.all_of(name)]
    generations = [generation for record in records for generation in record.all_of(name)]
    passed = {judge: check_rates(records, name, judge) for judge in check_judges}
    lengths = [generation.num_tokens for generation in generations]
    length = mean_over_prompts(lengths, prompts)
    stop_rate = share_over_prompts([float(each.stopped) for each in generations], prompts)
    assert length
    assert stop_rate
    rewards = {}
    for judge in dict.fromkeys(judge for g in generations for judge in g.rewards):
        over = share_over_prompts if judge in passed else mean_over_prompts  # as its pass@1
        rewards[judge] = over([g.rewards.get(judge) for g in generations], prompts)
    return GenerationSummary(
        length=length.mean,
        length_interval=length,
        stop_rate=stop_rate.mean,
        stop_rate_interval=stop_rate,
        entropy=mean_over_prompts([g.entropy for g in generations], prompts, lengths),
        distinct_completions=distinct_share([g.completion for g in generations]),
        rewards=rewards,
        pass_rates=passed,
        kl=mean_over_prompts([g.kl for g in generations], prompts),
        rouge_1=mean_over_prompts([g.rouge_1 for g in generations], prompts),
        rouge_2=mean_over_prompts([g.rouge_2 for g in generations], prompts),
        rouge_l=mean_over_prompts([g.rouge_l for g in generations], prompts),
    )


def checks(records: Sequence[PromptRecord]) -> list[str]:
    """Judges whose rewards are all 0 or 1."""
    named = ((record, name) for record in records for name in (*record.systems, REFERENCE))
    rewards = [generation.rewards for record, name in named for generation in record.all_of(name)]
    judges = dict.fromkeys(judge for each in rewards for judge in each)
    values = {judge: {each.get(judge) for each in rewards} - {None} for judge in judges}
    return [judge for judge in judges if values[judge] and values[judge] <= {0, 1}]


def check_rates(records: Sequence[PromptRecord], name: str, judge: str) -> Rates:
    """Pass rates of a system's completions by a check."""
    samples = [record.all_of(name) for record in records]
    votes = [[g.answers.get(judge) for g in generations] for generations in samples]
    has_votes = any(judge in g.answers for generations in samples for g in generations)
    rewards = [[g.rewards.get(judge) for g in generations] for generations in samples]
    prompts = [record.prompt for record in records]
    return pass_rates(rewards, votes if has_votes else None, prompts)


# ---- systems -------------------------------------------------------------------------------------


def describe_system(
    path: str,
    score: str,  # that its accuracy is of: one of `--policy_scores`, `logp`, "" of a reward model
    names: Mapping[str, str],  # of systems and judges, by path
    reward_models: Sequence[str],  # paths
    comparison: Comparison | None,
    prompt_records: Sequence[PromptRecord],
) -> System:
    """A system with its accuracy, if there are pairs, the cost of its run, and its generations."""
    name = names[path]
    compared = {each.name: each.accuracy for each in (comparison.systems if comparison else ())}
    run_dir, step = folder_of_run(path)
    cost = run_cost(run_dir, step) if read_training_config(run_dir) else {}
    generations = summarise(prompt_records, name)
    rewards = generations.rewards if generations else {}
    return System(
        name=name,
        kind="reward_model" if path in reward_models else "policy",
        path=path,
        scored_by=score.replace("_", " ") or "reward",
        accuracy=compared.get(score_name(name, score)),
        minutes=cost.get("elapsed_minutes"),
        peak_memory_gb=cost.get("peak_memory_gb"),
        generations=generations,
        gold_reward=rewards.get(names.get("gold", "")),
        reward=rewards.get(names[reward_models[0]]) if reward_models else None,
    )


def attainable_accuracy(pairs: Sequence[Mapping[str, Any]]) -> float | None:
    """Expected accuracy of a judge that knows the odds of each label: mean max(p, 1 - p).

    A label is one draw, so no judge can expect more. None unless all pairs have the probability of
    their labels.
    """
    chances = [pair["label_probability"] for pair in pairs]
    has_chances = chances and all(type(x) in (int, float) and 0 <= x <= 1 for x in chances)
    return sum(max(x, 1 - x) for x in chances) / len(chances) if has_chances else None
