"""SciTLDR: means over seeds, and differences of DPO and GRPO to SFT."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import mean

import yaml

from common.record.jsonl import read_jsonl
from common.report import markdown
from experiments.evidence.records import studies
from experiments.evidence.records.replications import (
    COLUMNS,
    draw,
    evaluations,
    means,
    measured,
    win_rate,
)
from experiments.evidence.records.texts import REWARDS
from experiments.runs.outcomes import over, over_seeds
from experiments.runs.power import HEADERS, power_of

PART = "scitldr"


def differences() -> str:
    """Differences of DPO and GRPO to SFT of the same seed: means over seeds."""
    columns = {"model": COLUMNS["model"], "trained": ("reward as trained", 1, 2)}
    columns |= {key: COLUMNS[key] for key in ("rouge_l", "length")}
    results = evaluations(PART)
    seeds = [measured(result) for result in results.values()]
    for lines, seed in zip(seeds, results, strict=True):
        for name, reward in as_trained(seed).items():
            lines[name]["trained"] = reward
    rows = []
    for name in ("dpo", "grpo"):
        changes = {}
        for key, (head, scale, digits) in columns.items():
            pairs = [(lines[name][key], lines["sft"][key]) for lines in seeds]
            by_seed = [scale * (new - sft) for new, sft in pairs if new is not None is not sft]
            changes[head] = (by_seed, digits)
        rates = [win_rate(result, name, "sft") for result in results.values()]
        wins = [100 * rate - 50 for rate in rates if rate is not None]
        changes["RM preference at equal length - 50, %"] = (wins, 1)
        for head, (by_seed, digits) in changes.items():
            power = power_of(over_seeds(by_seed))
            rows.append([name, head, over(by_seed, digits), *power.cells(digits)])
    return markdown.table(["compared with sft", "measure", "difference [95%]", *HEADERS], rows)


def as_trained(seed: str) -> dict[str, float]:
    """The mean reward of each system's completions, with GRPO's penalty for not stopping."""
    lines = read_jsonl(studies.RECORDS / PART / f"seed_{seed}" / "evaluation" / REWARDS)
    recipe = yaml.safe_load((studies.STUDIES / PART / "grpo.yaml").read_text())
    penalty = recipe["missing_eos_penalty"]
    rewards: dict[str, list[float]] = defaultdict(list)
    for name, completions in (pair for line in lines for pair in line.items()):
        rewards[name] += [
            sum(own["rewards"].values()) if own["stopped"] else penalty for own in completions
        ]
    return {name: mean(found) for name, found in rewards.items()}


TABLES: dict[str, Callable[[], str]] = {
    f"{PART}.mean": partial(means, PART),
    f"{PART}.differences": differences,
    f"{PART}.picture": lambda: f"![Accuracy and reward of seed 0](../assets/{PART}.png)",
}
FIGURES = {PART: partial(draw, PART)}
