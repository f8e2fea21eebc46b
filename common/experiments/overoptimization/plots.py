"""The two pictures of over-optimisation, drawn from `results.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.experiments.overoptimization.curves import Fit
from common.report.plots import COLOURS, GREY, save, style, titled_figure

TITLES = {
    "best_of_n": "Best of n",
    "rejection": "SFT on the best of n",
    "dpo": "DPO over beta",
    "grpo": "GRPO over steps",
}
SETTINGS = {"best_of_n": "n", "rejection": "n", "dpo": "beta", "grpo": "step"}
COLOUR_OF = dict(zip(TITLES, COLOURS, strict=False))
DPI = 110  # 880 points wide: legible at 800, and a small file
NEAREST = 0.05  # nats; what is nearer to the SFT policy has no place on a logarithmic axis
SEED: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.35}
MEAN: dict[str, Any] = {"linewidth": 2.2, "marker": "o", "markersize": 3.5}

Results = Mapping[str, Any]


def methods_of(results: Results) -> list[str]:
    """The methods that were measured, in the order of the pictures."""
    there = {point["method"] for point in results["points"]}
    return [method for method in TITLES if method in there]


def series_of(results: Results, method: str, value: str) -> np.ndarray:
    """A value of a method's points, (S, K): seeds by settings; of an interval the mean."""
    rows = []
    for start in results["seeds"]:
        own = [p for p in results["points"] if (p["method"], p["seed"]) == (method, start["seed"])]
        rows.append([p[value] if value == "distance" else p[value]["mean"] for p in own])
    return np.array(rows)


def settings_of(results: Results, method: str) -> list[float]:
    """The n, betas or steps of a method."""
    points = [p for p in results["points"] if p["method"] == method]
    return [p["setting"] for p in points if p["seed"] == points[0]["seed"]]


def draw_curves(results: Results, path: Path) -> Path:
    """Gains of both judges over the distance, a panel for each method."""
    methods = methods_of(results)
    num_rows = -(-len(methods) // 2)
    title = "The reward that is optimised, and the one that is wanted"
    with style():
        figure = titled_figure(title, 8, 0.7 + 2.9 * num_rows)
        grid = figure.subplots(num_rows, 2, squeeze=False).ravel()
        for axes, method in zip(grid, methods, strict=False):
            draw_method(axes, results, method)
        for axes in grid[len(methods) :]:
            axes.set_visible(False)
        return save(figure, path, DPI)


def draw_method(axes: Any, results: Results, method: str) -> None:
    """One panel: seeds thin, their mean thick, gold solid, proxy dashed, the fit dotted.

    Every line begins at the SFT policy, whose distance and gain are 0.
    """
    colour = COLOUR_OF[method]
    starts = results["seeds"]
    distances = series_of(results, method, "distance")
    distances = np.pad(distances, ((0, 0), (1, 0)))  # (S, 1 + K)
    for judge, line in (("gold", "-"), ("proxy", "--")):
        scale = np.array([[start[f"{judge}_std"] or 1.0] for start in starts])  # (S, 1)
        gains = np.pad(series_of(results, method, f"{judge}_gain") / scale, ((0, 0), (1, 0)))
        axes.plot([], [], line, color=colour, linewidth=2.2, label=judge)
        for x, y in zip(distances, gains, strict=True):
            axes.plot(x, y, line, color=colour, **SEED)
        axes.plot(distances.mean(0), gains.mean(0), line, color=colour, **MEAN)
    draw_fit(axes, results, method, float(distances.mean(0).max()))
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set(
        title=TITLES[method], xlabel="sqrt(KL to SFT), sqrt(nats)", ylabel="gain, SD of SFT samples"
    )
    axes.legend(loc="best")


def draw_fit(axes: Any, results: Results, method: str, longest: float) -> None:
    """The fitted gain in gold, in the unit of the panel."""
    (found,) = (fit for fit in results["fits"] if fit["method"] == method)
    fit = Fit(found["form"], found["alpha"]["value"], found["beta"]["value"], 0.0)
    scale = np.mean([start["gold_std"] or 1.0 for start in results["seeds"]])
    x = np.linspace(0, longest, 200)
    line: dict[str, Any] = {"color": "black", "linewidth": 1.2, "linestyle": ":"}
    axes.plot(x, fit.at(x) / scale, label=f"gold, fitted R_{found['form']}", **line)


def draw_frontier(results: Results, path: Path) -> Path:
    """Gold reward over KL, every method in one panel."""
    with style():
        figure = titled_figure("", 8, 4.8)
        axes = figure.subplots()
        start = float(np.mean([seed["gold"]["mean"] for seed in results["seeds"]]))
        axes.axhline(start, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f"SFT {start:.3f}",
            (1, start),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            color=GREY,
        )
        for method in methods_of(results):
            draw_points(axes, results, method)
        axes.set_xscale("log")
        ticks = [t for t in (0.1, 0.3, 1, 3, 10, 30, 100, 300) if t <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        unit = "KL(policy || SFT), nats per completion"
        axes.set(title="Reward-KL frontier", xlabel=unit, ylabel="gold reward")
        axes.legend(loc="best")
        return save(figure, path, DPI)


def draw_points(axes: Any, results: Results, method: str) -> None:
    """Single seeds as dots, their mean as a line."""
    kl, gold = (series_of(results, method, value) for value in ("kl", "gold"))  # (S, K)
    far, colour = kl.mean(0) > NEAREST, COLOUR_OF[method]
    kl, gold, values = kl[:, far], gold[:, far], np.array(settings_of(results, method))[far]
    ends = f"{SETTINGS[method]} {values[0]:g} to {values[-1]:g}" if values.size else ""
    axes.plot(kl.ravel(), gold.ravel(), ".", color=colour, alpha=0.4, markersize=5)
    label = f"{TITLES[method]} ({ends})"
    axes.plot(kl.mean(0), gold.mean(0), color=colour, label=label, **MEAN)
