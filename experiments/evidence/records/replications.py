"""A recorded chain of stages: the table of means over its seeds, and a picture."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.evaluation.records import REFERENCE, Results
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from common.report.figures import draw_accuracy, draw_reward, held_out
from common.report.plots import save, style, system_colours, titled_figure
from experiments.evidence.records import studies
from experiments.runs.outcomes import over
from experiments.runs.sweep.effects import DPI

COLUMNS = {  # of the means over seeds: heading, scale, digits
    "accuracy": ("accuracy %", 100, 1),
    "gold": ("gold reward", 1, 3),
    "model": ("RM score", 1, 2),
    "wins": ("RM prefers it to the reference at equal length %", 100, 1),
    "rouge_l": ("ROUGE-L", 100, 1),
    "kl": ("KL", 1, 2),
    "length": ("length", 1, 1),
    "stop_rate": ("stop %", 100, 1),
}
SCORES = ("{}", "{} implicit_reward", "{} logp")  # of a system's accuracy: the first that is there


def evaluations(recorded: str) -> dict[str, Results]:
    """The results of evaluation, by seed."""
    files = sorted((studies.RECORDS / recorded).glob("seed_*/evaluation/results.json"))
    return {
        file.parents[1].name.removeprefix("seed_"): Results(**json.loads(file.read_text()))
        for file in files
    }


def measured(results: Results) -> dict[str, dict[str, Any]]:
    """The values of reference completions, every system, and baselines that need no model."""
    models = reward_models(results.systems)
    references = results.reference_completions
    compared = (results.comparison or {}).get("systems", [])
    lines = {}
    for system in [
        *([{**references, "name": REFERENCE}] if references else []),
        # First those without a run: the model that the chain starts from
        *sorted(results.systems, key=lambda system: system.get("minutes") is not None),
        *(baseline for baseline in compared if baseline["name"] in ("longer wins", "ROUGE-L wins")),
    ]:
        rewards = system.get("rewards") or {}
        wins = [
            rate["length_controlled"]
            for rate in results.win_rates
            if (rate["a"], rate["b"]) == (system["name"], REFERENCE) and rate["judge"] in models
        ]
        lines[system["name"]] = {
            **{key: system.get(key) for key in COLUMNS},
            "gold": rewards.get("gold"),
            "model": next((rewards[name] for name in models if name in rewards), None),
            "wins": next(iter(wins), None),
        }
    return lines


def means(recorded: str) -> str:
    """A line per system: means over seeds."""
    seeds = [measured(results) for results in evaluations(recorded).values()]
    names = list(seeds[0])
    heads, rows = [], [[name] for name in names]
    for key, (head, scale, digits) in COLUMNS.items():
        values_by_name = [[lines[name][key] for lines in seeds] for name in names]
        if all(value is None for values in values_by_name for value in values):
            continue
        heads.append(head)
        for row, values in zip(rows, values_by_name, strict=True):
            measurements = [scale * number(value) for value in values if value is not None]
            is_whole, is_share = len(measurements) == len(seeds), scale == 100
            row.append(over(measurements, digits, is_share=is_share) if is_whole else NOT_MEASURED)
    return markdown.table([f"mean of {len(seeds)} seeds [95%]", *heads], rows)


def win_rate(results: Results, name: str, other: str) -> float:
    """Share of pairs in which the reward model prefers a system, at equal length."""
    models = reward_models(results.systems)
    (rate,) = (
        rate["length_controlled"]["win_rate"]
        for rate in results.win_rates
        if (rate["a"], rate["b"]) == (name, other) and rate["judge"] in models
    )
    return float(rate)


def reward_models(systems: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the reward models among the systems of an evaluation."""
    return [system["name"] for system in systems if system.get("kind") == "reward_model"]


def number(value: Any) -> float:
    """A number, or the value of a mapping that has its interval too."""
    if isinstance(value, dict):
        value = next(value[key] for key in ("mean", "accuracy", "win_rate") if key in value)
    return float(value)


def draw(recorded: str) -> Path:
    """Draw accuracy, with intervals over prompts, and reward of seed 0."""
    results = evaluations(recorded)["0"]
    assert results.comparison, "an evaluation on pairs"
    compared = {line["name"]: line["accuracy"] for line in results.comparison["systems"]}
    for system in results.systems:
        names = [score.format(system["name"]) for score in SCORES]
        over_prompts = next(compared[name] for name in names if name in compared)
        system["accuracy"] |= {end: over_prompts[f"prompt_{end}"] for end in ("low", "high")}
    colours = system_colours(system["name"] for system in results.systems)
    with style():
        figure = titled_figure(held_out(results).capitalize(), 5, 6.6)
        above, below = figure.subplots(2, 1)
        draw_accuracy(above, results, colours)
        draw_reward(below, results, colours)
        return save(figure, studies.ROOT / "assets" / f"{recorded}.png", DPI)
