"""The report of over-optimisation and its two pictures, made of `results.json` alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.evaluation.accuracy import Interval
from common.report.blocks import Block, Picture, Section, Table
from common.report.plots import GREY, save, style, system_colours, titled_figure
from common.report.tables import interval_cell
from experiments.runs.overoptimization.curves import fit

TITLES = {
    "best_of_n": "Best of n",
    "rejection": "SFT on the best of n",
    "dpo": "DPO over beta",
    "grpo": "GRPO over steps",
}
SETTINGS = {"best_of_n": "n", "rejection": "n", "dpo": "beta", "grpo": "step"}
DPI = 110  # 880 points wide: legible at 800, and a small file
NEAREST = 0.05  # nats; a point nearer to the SFT policy would stretch the logarithmic axis
MEAN: dict[str, Any] = {"linewidth": 2.2, "marker": "o", "markersize": 3.5}

Results = Mapping[str, Any]


def methods_of(results: Results) -> list[str]:
    """The methods that have points, in their order."""
    return list(dict.fromkeys(point["method"] for point in results["points"]))


def title(method: str) -> str:
    """A method's name in pictures and tables; that of a variant of GRPO has its flags."""
    return TITLES.get(method) or method.replace("grpo ", "GRPO, ")


def setting(method: str) -> str:
    """The name of what a method's points differ in."""
    return SETTINGS[method.partition(" ")[0]]


def series_of(results: Results, method: str, name: str) -> np.ndarray:
    """A value of a method's points, (S, K): seeds by settings; of an interval the mean."""
    values = [point[name] for point in results["points"] if point["method"] == method]
    means = [value["mean"] if isinstance(value, dict) else value for value in values]
    return np.array(means).reshape(len(results["seeds"]), -1)


def draw_curves(results: Results, path: Path, num_columns: int = 2, width: float = 8) -> Path:
    """Gains of both judges over the distance, a panel for each method."""
    methods = methods_of(results)
    num_rows = -(-len(methods) // num_columns)
    title = "Gold and proxy reward over the distance"
    with style():
        figure = titled_figure(title, width, 0.7 + 2.7 * num_rows)
        for i, method in enumerate(methods):
            draw_method(figure.add_subplot(num_rows, num_columns, i + 1), results, method)
        return save(figure, path, DPI)


def draw_method(axes: Any, results: Results, method: str) -> None:
    """One panel: seeds thin, their mean thick, gold solid, proxy dashed, the fit dotted.

    Every line begins at the SFT policy, whose distance and gain are 0.
    """
    start, colour = ((0, 0), (1, 0)), system_colours(methods_of(results))[method]
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
    form = "bon" if method == "best_of_n" else "rl"
    fitted = fit(form, distances[:, 1:], series_of(results, method, "gold_gain"))
    x = np.linspace(0, distances.mean(0).max(), 200)
    y, label = fitted.at(x) / scales["gold"].mean(), f"gold, fitted R_{form}"
    axes.plot(x, y, ":", color="black", linewidth=1.2, label=label)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set(title=title(method), xlabel="sqrt(KL to SFT), sqrt(nats)")
    axes.set_ylabel("gain, SD of SFT samples")
    axes.legend(loc="best")


def draw_frontier(results: Results, path: Path) -> Path:
    """Gold reward over KL, every method in one panel: dots are seeds, a line their mean."""
    with style():
        figure = titled_figure("", 8, 4.8)
        axes = figure.subplots()
        start = np.mean([seed["gold"]["mean"] for seed in results["seeds"]])
        axes.axhline(start, color=GREY, linestyle="--", linewidth=1, label=f"SFT {start:.3f}")
        colours = system_colours(methods_of(results))
        for method, colour in colours.items():
            kl, gold, settings = (
                series_of(results, method, name) for name in ("kl", "gold", "setting")
            )  # (S, K)
            far = kl.mean(0) > NEAREST
            kl, gold, values = kl[:, far], gold[:, far], settings[0, far]
            ends = f"{setting(method)} {values[0]:g} to {values[-1]:g}" if values.size else ""
            axes.plot(kl.ravel(), gold.ravel(), ".", color=colour, alpha=0.4, markersize=5)
            label = f"{title(method)} ({ends})"
            axes.plot(kl.mean(0), gold.mean(0), color=colour, label=label, **MEAN)
        axes.set(title="Reward-KL frontier", xscale="log", ylabel="gold reward")
        axes.set_xlabel("KL(policy || SFT), nats per completion")
        axes.legend(loc="best")
        return save(figure, path, DPI)


# ---- the page ------------------------------------------------------------------------------------


def report_blocks(results: Results, plots: Path) -> list[Block]:
    """The blocks of the page; the pictures are drawn into a folder."""
    caption = (
        "Gain over the SFT policy in standard deviations of its samples. Gold solid, proxy "
        "dashed; seeds thin, their mean thick; dotted: d (a - b d) for best of n, d (a - b log d) "
        "for the others (Gao et al. 2022), fitted to the gold reward of all seeds."
    )
    note = (
        "The KL of best of n is log n - (n - 1) / n, an upper bound; of the other policies the "
        "mean of log pi - log SFT over their completions of the held-out prompts."
    )
    frontier = draw_frontier(results, plots / "frontier.png")
    dots = Picture(frontier, "Dots are single seeds, lines their mean.")
    return [
        Picture(draw_curves(results, plots / "overoptimization.png"), caption),
        Section("Who turned", [turns_table(results), fallen(results)]),
        Section("Reward-KL frontier", [dots, note]),
    ]


def turning(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    """The turns of each method that has its best gold reward before its last setting."""
    methods = dict.fromkeys(turn["method"] for turn in results["turns"])
    every = {method: [t for t in results["turns"] if t["method"] == method] for method in methods}
    return {m: turns for m, turns in every.items() if any(t["peak"] != t["last"] for t in turns)}


def turns_table(results: Results) -> Table:
    """A row for each seed of each method that turns, from the best setting to the last one."""
    rows = [
        [
            title(method),
            str(turn["seed"]),
            f"{setting(method)} {turn['peak']:g}, {turn['last']:g}",
            interval_cell(Interval(**turn["gold_change"]), 1, 3, sign="+"),
            interval_cell(Interval(**turn["proxy_change"]), 1, 2, sign="+"),
        ]
        for method, turns in turning(results).items()
        for turn in turns
    ]
    caption = (
        "Changes from the setting with the largest gold reward, searched on every other prompt, to "
        "the last one, measured on the prompts between."
    )
    return Table(["method", "seed", "best, last", "gold", "proxy"], rows, caption)


def fallen(results: Results) -> str:
    """The number of seeds of each turning method on which gold fell while the proxy rose."""
    counts = []
    for method, turns in turning(results).items():
        both = sum(turn["gold_change"]["high"] < 0 < turn["proxy_change"]["low"] for turn in turns)
        counts.append(f"{title(method)} {both} of {len(turns)}")
    fell = "Seeds on which gold fell while the proxy rose, both intervals apart from 0"
    return f"{fell}: {', '.join(counts) or 'none'}."
