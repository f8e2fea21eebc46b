"""The picture of a comparison's calibration."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.evaluation.calibration import NUM_BINS
from common.report.plots import COLOURS, GREY, save, style

LARGEST_DOT = 120  # points squared, for a bin that holds all observations


def draw(comparison: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw the observed share against the predicted probability, one panel a system.

    Args:
        comparison: What `comparison.compare` returns.
        path: The PNG to write.

    Returns:
        The file written; none if no system gives log odds.
    """
    from matplotlib.figure import Figure

    curves = comparison["calibration"]
    if not curves:
        return []
    num_columns = min(3, len(curves))
    num_rows = math.ceil(len(curves) / num_columns)
    with style():
        figure = Figure(figsize=(3.6 * num_columns, 3.6 * num_rows + 0.4), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        title = f"Calibration, {comparison['num_pairs']:,} pairs, {NUM_BINS} bins"
        figure.suptitle(title, fontweight="bold")
        for i, (axes, (name, found)) in enumerate(zip(grid, curves.items(), strict=False)):
            draw_curve(axes, found["bins"], COLOURS[i % len(COLOURS)])
            error = f"ECE {found['ece']:.3f} (by chance {found['ece_by_chance']:.3f})"
            title = f"{textwrap.fill(name, 34)}\n{error}"
            axes.set(title=title, xlabel="predicted probability")
            axes.set(ylabel="share preferred", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        for axes in grid[len(curves) :]:
            axes.set_visible(False)
        return [save(figure, path)]


def draw_curve(axes: Any, bins: Sequence[Mapping[str, Any]], colour: str) -> None:
    """A dot for each bin that is not empty, its area the share of observations in it."""
    filled = [part for part in bins if part["count"]]
    total = sum(part["count"] for part in filled)
    x = [part["predicted"] for part in filled]
    y = [part["observed"] for part in filled]
    below = [max(0.0, part["observed"] - part["low"]) for part in filled]
    above = [max(0.0, part["high"] - part["observed"]) for part in filled]
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    axes.errorbar(x, y, [below, above], color=colour, linewidth=1, capsize=2)
    sizes = [10 + LARGEST_DOT * part["count"] / total for part in filled]
    axes.scatter(x, y, sizes, color=colour, zorder=3)
