"""A recorded chain of stages: the table of means over its seeds, and a picture."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from common.evaluation.accuracy import Interval
from common.evaluation.records import REFERENCE, RESULTS
from common.evaluation.results import GenerationSummary, Results, System, read_results, score_name
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from common.report.figures import accuracies_of, draw_accuracy, draw_reward, held_out
from common.report.plots import save, style, system_colours, titled_figure
from experiments.evidence.records import studies
from experiments.runs.outcomes import over
from experiments.runs.sweep.effects import DPI

COLUMNS = {  # of the means over seeds: heading, scale, digits
    "accuracy": ("accuracy %", 100, 1),
    "gold": ("gold reward", 1, 3),
    "model": ("reward", 1, 2),
    "wins": ("RM prefers it to the reference at equal length %", 100, 1),
    "rouge_l": ("ROUGE-L", 100, 1),
    "kl": ("KL", 1, 2),
    "length": ("length", 1, 1),
    "stop_rate": ("stop %", 100, 1),
}
SCORES = ("", "implicit_reward", "logp")  # of a system's accuracy: the first that is there


def evaluations(recorded: str) -> dict[str, Results]:
    """The results of evaluation, by seed."""
    files = sorted((studies.RECORDS / recorded).glob(f"seed_*/evaluation/{RESULTS}"))
    return {file.parents[1].name.removeprefix("seed_"): read_results(file) for file in files}


def measured(results: Results) -> dict[str, dict[str, float | None]]:
    """The values of reference completions, every system, and baselines that need no model."""
    models = reward_models(results.systems)
    # First those without a run: the model that the chain starts from
    systems = sorted(results.systems, key=lambda system: system.minutes is not None)
    references = results.reference_completions
    generations: dict[str, GenerationSummary | None] = {REFERENCE: references} if references else {}
    generations |= {system.name: system.generations for system in systems}
    accuracies = accuracies_of(systems)
    for score in results.comparison.systems if results.comparison else ():
        if score.name in ("longer wins", "ROUGE-L wins"):
            accuracies[score.name] = score.accuracy.interval
    lines = {}
    for name in dict.fromkeys([*generations, *accuracies]):
        sampled = generations.get(name)
        rewards = sampled.rewards if sampled else {}
        lines[name] = {
            "accuracy": mean_of(accuracies.get(name)),
            "gold": mean_of(rewards.get("gold")),
            "model": mean_of(next((rewards[model] for model in models if model in rewards), None)),
            "wins": win_rate(results, name, REFERENCE),
            "rouge_l": mean_of(sampled.rouge_l) if sampled else None,
            "kl": mean_of(sampled.kl) if sampled else None,
            "length": sampled.length if sampled else None,
            "stop_rate": sampled.stop_rate if sampled else None,
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
            measurements = [scale * value for value in values if value is not None]
            is_whole, is_share = len(measurements) == len(seeds), scale == 100
            row.append(over(measurements, digits, is_share=is_share) if is_whole else NOT_MEASURED)
    return markdown.table([f"mean of {len(seeds)} seeds [95%]", *heads], rows)


def win_rate(results: Results, name: str, other: str) -> float | None:
    """Share of pairs in which the reward model prefers a system, at equal length."""
    models = reward_models(results.systems)
    rates = [r for r in results.win_rates if (r.a, r.b) == (name, other) and r.judge in models]
    at_equal_length = [rate.length_controlled for rate in rates if rate.length_controlled]
    return at_equal_length[0].win_rate if at_equal_length else None


def reward_models(systems: Iterable[System]) -> list[str]:
    """Names of the reward models among the systems of an evaluation."""
    return [system.name for system in systems if system.kind == "reward_model"]


def mean_of(interval: Interval | None) -> float | None:
    """The mean of an interval, if there is one."""
    return interval.mean if interval else None


def draw(recorded: str) -> Path:
    """Draw accuracy, with intervals over prompts, and reward of seed 0."""
    results = evaluations(recorded)["0"]
    assert results.comparison, "an evaluation on pairs"
    compared = {score.name: score.accuracy for score in results.comparison.systems}
    systems = []
    for system in results.systems:
        names = [score_name(system.name, score) for score in SCORES]
        accuracy = next(compared[name] for name in names if name in compared)
        low, high = accuracy.prompt_low, accuracy.prompt_high
        assert low is not None is not high, "enough prompts for an interval over them"
        systems.append(replace(system, accuracy=replace(accuracy, low=low, high=high)))
    results.systems = systems
    colours = system_colours(system.name for system in results.systems)
    with style():
        figure = titled_figure(held_out(results).capitalize(), 5, 6.6)
        above, below = figure.subplots(2, 1)
        draw_accuracy(above, results, colours)
        draw_reward(below, results, colours)
        return save(figure, studies.ROOT / "assets" / f"{recorded}.png", DPI)
