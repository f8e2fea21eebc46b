"""Figures of an evaluation, drawn from `results.json`."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.evaluation.accuracy import Interval
from common.evaluation.results import MODEL_REWARD, Results, System, main_reward
from common.report.plots import GREY, save, style, titled_figure


def summary_figures(results: Results, colours: Mapping[str, str], folder: Path) -> list[Path]:
    """Draw each system's accuracy and reward, a picture for each that was measured."""
    drawers = {"accuracy": draw_accuracy} if results.num_pairs else {}
    drawers |= {"reward": draw_reward} if main_reward(results.systems)[0] else {}
    pictures = []
    for name, draw in drawers.items():
        with style():
            figure = titled_figure("", 4.6, 3.8)
            draw(figure.add_subplot(), results, colours)
            pictures.append(save(figure, folder / f"{name}.png"))
    return pictures


def held_out(results: Results) -> str:
    """A line on the held-out pairs and prompts."""
    k = results.num_generations
    prompts = "prompts" if k == 1 else f"prompts with {k} samples each"
    numbers = {"preference pairs": results.num_pairs, prompts: results.num_prompts}
    return f"held-out, {' and '.join(f'{n:,} {rows}' for rows, n in numbers.items() if n)}"


def accuracies_of(systems: Sequence[System]) -> dict[str, Interval | None]:
    """Each system's accuracy with Wilson's interval."""
    return {s.name: s.accuracy.interval if s.accuracy else None for s in systems}


def draw_accuracy(axes: Any, results: Results, colours: Mapping[str, str]) -> None:
    """Each system's accuracy, between chance and what is attainable."""
    axes.set(title="Preference accuracy, 95% interval", ylabel="% of pairs, a tie counts one half")
    ends = draw_intervals(axes, accuracies_of(results.systems), colours, "{:.1f}", scale=100)
    levels = {"chance\n50": 50.0}
    if results.attainable_accuracy is not None:
        attainable = 100 * results.attainable_accuracy
        levels[f"attainable\n{attainable:.1f}"] = attainable
    look = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": GREY}
    for label, level in levels.items():
        axes.axhline(level, color=GREY, linestyle="--", linewidth=1)
        place = {"xy": (1, level), "xycoords": ("axes fraction", "data"), "xytext": (4, 0)}
        axes.annotate(label, **place, **look)
    ends += levels.values()
    margin = 0.1 * (max(ends) - min(ends))
    axes.set_ylim(max(0, min(ends) - margin), min(100, max(ends) + margin))


def draw_reward(axes: Any, results: Results, colours: Mapping[str, str]) -> None:
    """Each system's `main_reward`, which there must be."""
    title, intervals = main_reward(results.systems)
    digits = "{:.2f}" if title == MODEL_REWARD else "{:.3f}"
    draw_intervals(axes, intervals, colours, digits)
    axes.set(title=f"{title}, 95% interval", ylabel="mean over the completions")
    axes.margins(y=0.15)


def draw_intervals(
    axes: Any,
    intervals: Mapping[str, Interval | None],
    colours: Mapping[str, str],
    number: str,
    scale: float = 1,
) -> list[float]:
    """A dot for each name that has a value, with its interval and the value; all their ends."""
    measured = {name: interval for name, interval in intervals.items() if interval}
    ends: list[float] = []
    for index, (name, interval) in enumerate(measured.items()):
        value, errors = scale * interval.mean, None
        if interval.low is not None and interval.high is not None:
            low, high = scale * interval.low, scale * interval.high
            errors = [[value - low], [high - value]]
            ends += [low, high]
        dot = {"fmt": "o", "markersize": 6, "capsize": 4, "color": colours[name]}
        axes.errorbar([index], [value], errors, **dot)
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(number.format(value), (index, value), **place)
    narrow = len(measured) > 5 or max(map(len, measured), default=0) > 12
    labels = [textwrap.fill(name, 18 if narrow else 8) for name in measured]
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if narrow else {}
    axes.set_xticks(range(len(measured)), labels, **turned)
    axes.set_xlim(-0.5, len(measured) - 0.2)
    axes.grid(visible=False, axis="x")
    return ends
