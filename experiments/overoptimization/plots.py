"""The two pictures of over-optimisation, drawn from `results.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.report.plots import GREY, save, style, system_colours, titled_figure
from experiments.overoptimization.curves import Fit

TITLES = {
    "best_of_n": "Best of n",
    "rejection": "SFT on the best of n",
    "dpo": "DPO over beta",
    "grpo": "GRPO over steps",
}
SETTINGS = {"best_of_n": "n", "rejection": "n", "dpo": "beta", "grpo": "step"}
COLOUR_OF = system_colours(TITLES)
DPI = 110  # 880 points wide: legible at 800, and a small file
NEAREST = 0.05  # nats; what is nearer to the SFT policy has no place on a logarithmic axis
MEAN: dict[str, Any] = {"linewidth": 2.2, "marker": "o", "markersize": 3.5}

Results = Mapping[str, Any]


def series_of(results: Results, method: str, name: str) -> np.ndarray:
    """A value of a method's points, (S, K): seeds by settings; of an interval the mean."""
    found = [point[name] for point in results["points"] if point["method"] == method]
    means = [value["mean"] if isinstance(value, dict) else value for value in found]
    return np.array(means).reshape(len(results["seeds"]), -1)


def draw_curves(results: Results, path: Path) -> Path:
    """Gains of both judges over the distance, a panel for each method."""
    num_rows = -(-len(results["fits"]) // 2)
    title = "The reward that is optimised, and the one that is wanted"
    with style():
        figure = titled_figure(title, 8, 0.7 + 2.9 * num_rows)
        for i, fit in enumerate(results["fits"]):
            draw_method(figure.add_subplot(num_rows, 2, i + 1), results, fit)
        return save(figure, path, DPI)


def draw_method(axes: Any, results: Results, found: Mapping[str, Any]) -> None:
    """One panel: seeds thin, their mean thick, gold solid, proxy dashed, the fit dotted.

    Every line begins at the SFT policy, whose distance and gain are 0.
    """
    method, start = found["method"], ((0, 0), (1, 0))
    colour = COLOUR_OF[method]
    scales = {
        judge: np.array([[seed[f"{judge}_std"] or 1.0] for seed in results["seeds"]])  # (S, 1)
        for judge in ("gold", "proxy")
    }
    distances = np.pad(series_of(results, method, "distance"), start)  # (S, 1 + K)
    for (judge, scale), line in zip(scales.items(), ("-", "--"), strict=True):
        gains = np.pad(series_of(results, method, f"{judge}_gain") / scale, start)
        axes.plot([], [], line, color=colour, linewidth=2.2, label=judge)
        axes.plot(distances.T, gains.T, line, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(distances.mean(0), gains.mean(0), line, color=colour, **MEAN)
    fit = Fit(found["form"], found["alpha"]["value"], found["beta"]["value"], 0.0)
    x = np.linspace(0, distances.mean(0).max(), 200)
    y, label = fit.at(x) / scales["gold"].mean(), f"gold, fitted R_{fit.form}"
    axes.plot(x, y, ":", color="black", linewidth=1.2, label=label)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set(title=TITLES[method], xlabel="sqrt(KL to SFT), sqrt(nats)")
    axes.set_ylabel("gain, SD of SFT samples")
    axes.legend(loc="best")


def draw_frontier(results: Results, path: Path) -> Path:
    """Gold reward over KL, every method in one panel: dots are seeds, a line their mean."""
    with style():
        figure = titled_figure("", 8, 4.8)
        axes = figure.subplots()
        start = np.mean([seed["gold"]["mean"] for seed in results["seeds"]])
        axes.axhline(start, color=GREY, linestyle="--", linewidth=1, label=f"SFT {start:.3f}")
        for method in (fit["method"] for fit in results["fits"]):
            kl, gold, settings = (
                series_of(results, method, name) for name in ("kl", "gold", "setting")
            )  # (S, K)
            far, colour = kl.mean(0) > NEAREST, COLOUR_OF[method]
            kl, gold, values = kl[:, far], gold[:, far], settings[0, far]
            ends = f"{SETTINGS[method]} {values[0]:g} to {values[-1]:g}" if values.size else ""
            axes.plot(kl.ravel(), gold.ravel(), ".", color=colour, alpha=0.4, markersize=5)
            label = f"{TITLES[method]} ({ends})"
            axes.plot(kl.mean(0), gold.mean(0), color=colour, label=label, **MEAN)
        axes.set_xscale("log")
        ticks = [t for t in (0.1, 0.3, 1, 3, 10, 30, 100, 300) if t <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        unit = "KL(policy || SFT), nats per completion"
        axes.set(title="Reward-KL frontier", xlabel=unit, ylabel="gold reward")
        axes.legend(loc="best")
        return save(figure, path, DPI)
