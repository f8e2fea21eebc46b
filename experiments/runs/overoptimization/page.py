"""The report of over-optimisation, made of `results.json` alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.evaluation.accuracy import Interval
from common.report.blocks import Block, Picture, Section, Table
from common.report.tables import interval_cell
from experiments.runs.overoptimization.plots import (
    Results,
    draw_curves,
    draw_frontier,
    setting,
    title,
)


def blocks(results: Results, plots: Path) -> list[Block]:
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
