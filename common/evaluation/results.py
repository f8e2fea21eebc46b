"""Results of an evaluation by name: what `results.json` holds and a report reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.distributed import is_rank0
from common.evaluation.accuracy import Interval, PreferenceAccuracy
from common.evaluation.records import RESULTS, typed

Rates = dict[str, Interval | None]
MODEL_REWARD = "Reward of completions"  # by the first reward model


def score_name(system: str, score: str) -> str:
    """The name of a system's score in `scores.jsonl`."""
    return f"{system} {score}".rstrip()


@dataclass(frozen=True)
class ComparedScore:
    """Accuracy of one score on all pairs, and on those of each source, of which there are several.

    A policy has a score for each of `--policy_scores`; baselines have one.
    """

    name: str  # as in `scores.jsonl`
    accuracy: PreferenceAccuracy
    accuracy_by: dict[str, dict[str, PreferenceAccuracy]] = field(default_factory=dict)

    @property
    def by_source(self) -> dict[str, PreferenceAccuracy]:
        """Accuracy by source; empty where all pairs have one."""
        return self.accuracy_by.get("source", {})


@dataclass(frozen=True)
class Difference:
    """Accuracy of one score minus that of another, on the same pairs."""

    first: str
    second: str
    difference: float  # in [-1, 1]
    low: float | None  # of the 95% paired bootstrap over prompts, None below `MIN_PROMPTS` of them
    high: float | None
    num_first_better: int  # discordant pairs
    num_second_better: int
    p_value: float  # McNemar's, too small where a prompt has several pairs that are alike


@dataclass(frozen=True)
class Comparison:
    """All scores on the same pairs."""

    num_pairs: int
    num_prompts: int
    systems: list[ComparedScore]
    differences: list[Difference]


@dataclass
class GenerationSummary:
    """Means over the completions of a system; None where nothing was measured."""

    length: float  # tokens
    length_interval: Interval
    stop_rate: float
    stop_rate_interval: Interval
    entropy: Interval | None  # nats per token, mean over tokens
    distinct_completions: float  # a share
    rewards: Rates = field(default_factory=dict)  # by judge
    pass_rates: dict[str, Rates] = field(default_factory=dict)  # by judge that says 0 or 1 only
    kl: Interval | None = None
    rouge_1: Interval | None = None
    rouge_2: Interval | None = None
    rouge_l: Interval | None = None


@dataclass
class System:
    """A policy or reward model: accuracy on all pairs, the cost of its run, its generations."""

    name: str
    kind: str  # `policy` or `reward_model`
    path: str
    scored_by: str = ""  # the score of which `accuracy` is, in words
    accuracy: PreferenceAccuracy | None = None
    minutes: float | None = None  # of training
    peak_memory_gb: float | None = None
    generations: GenerationSummary | None = None
    gold_reward: Interval | None = None  # of `rewards`, the function `gold`
    reward: Interval | None = None  # of `rewards`, the first reward model

    @property
    def rewards(self) -> Rates:
        """Rewards of its completions by judge."""
        return self.generations.rewards if self.generations else {}


@dataclass(frozen=True)
class LengthControlled:
    """A win rate at equal length; see `win_rates.length_controlled`."""

    win_rate: float
    low: float
    high: float
    length_effect: float  # phi, log-odds of a clearly longer completion: positive if longer wins


@dataclass(frozen=True)
class WinRate:
    """Win rate of a against b by a judge."""

    a: str
    b: str
    judge: str
    win_rate: float  # mean verdict
    low: float | None  # of its 95% interval, None of one prompt
    high: float | None
    num_wins: int  # verdicts above one half
    num_ties: int
    num_losses: int
    num_not_judged: int
    length_difference: float  # mean of a's tokens minus b's
    length_controlled: LengthControlled | None

    @property
    def interval(self) -> Interval:
        """The win rate with its interval."""
        return Interval(self.win_rate, self.low, self.high)


@dataclass
class Results:
    """Results of an evaluation."""

    dataset: str = ""
    split: str = ""
    num_pairs: int = 0
    num_prompts: int = 0
    num_generations: int = 1
    attainable_accuracy: float | None = None  # the best that the labels allow, where it is known
    systems: Sequence[System] = ()
    comparison: Comparison | None = None  # None without pairs
    reference_completions: GenerationSummary | None = None
    win_rates: Sequence[WinRate] = ()


def reward_functions(systems: Sequence[System]) -> list[str]:
    """The judges of completions that are neither reward models, which are systems, nor `gold`."""
    others = {"gold", *(s.name for s in systems if s.kind == "reward_model")}
    judges = dict.fromkeys(judge for system in systems for judge in system.rewards)
    return [judge for judge in judges if judge not in others]


def reward_model(systems: Sequence[System]) -> str:
    """The name of the first reward model, whose rewards are the `reward` of systems."""
    return next((s.name for s in systems if s.kind == "reward_model"), "reward")


def main_reward(systems: Sequence[System]) -> tuple[str, Rates]:
    """A title, and by system the gold reward, else a reward function, else the model's; or none."""
    choices = {"Gold reward of completions": [s.gold_reward for s in systems]}
    for judge in reward_functions(systems):
        choices[f"Reward {judge!r}"] = [s.rewards.get(judge) for s in systems]
    choices[MODEL_REWARD] = [s.reward for s in systems]
    for title, intervals in choices.items():
        if any(intervals):
            return title, dict(zip((s.name for s in systems), intervals, strict=True))
    return "", {}


def write_results(results: Results, output_dir: Path) -> None:
    """Write `results.json`, on rank 0: what a system generates is next to its other entries."""
    if is_rank0():
        values = asdict(results)
        values["systems"] = [s | (s.pop("generations") or {}) for s in values["systems"]]
        text = json.dumps(values, indent=2) + "\n"
        (output_dir / RESULTS).write_text(text, encoding="utf-8")


def read_results(path: Path) -> Results:
    """Read a `results.json`; it may lack what has a default, as one of an older version does."""
    values = json.loads(path.read_text(encoding="utf-8"))
    for system in values["systems"]:
        system["generations"] = system if "length" in system else None
    results: Results = typed(Results, values)
    return results
