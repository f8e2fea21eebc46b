"""The forest plot of a sweep: differences to the base with their intervals, a row per variant."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.experiments.outcomes import SeedMean
from common.report.plots import COLOURS, GREY, save, style

DPI = 110  # of a picture of many rows
ROW_HEIGHT = 0.24  # inches
PANEL_HEIGHT = 0.85  # inches beside the rows: title and axis
PANEL_WIDTH = 2.6  # inches
LABEL_WIDTH = 3.2  # inches
KEY = (
    "square: mean over seeds, filled where its 95% interval excludes 0; dots: seeds; "
    "orange: a patch"
)


@dataclass(frozen=True)
class Row:
    """A variant: its label, the differences by seed, and their mean."""

    label: str
    by_seed: Sequence[float]
    difference: SeedMean
    is_patched: bool = False


@dataclass(frozen=True)
class Panel:
    """One outcome. Panels of a group stand side by side and have the same rows."""

    group: str
    title: str
    unit: str
    rows: Sequence[Row]


def draw(panels: Sequence[Panel], path: Path) -> Path | None:
    """Draw the panels, a line of them for each group; None without any."""
    if not panels:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(panel.group for panel in panels))
    lines = [[panel for panel in panels if panel.group == group] for group in groups]
    heights = [PANEL_HEIGHT + ROW_HEIGHT * len(line[0].rows) for line in lines]
    num_columns = max(map(len, lines))
    with style():
        figure = Figure(
            figsize=(LABEL_WIDTH + PANEL_WIDTH * num_columns, sum(heights)), layout="constrained"
        )
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(lines), num_columns, height_ratios=heights)
        for i, line in enumerate(lines):
            for j, panel in enumerate(line):
                draw_panel(figure.add_subplot(grid[i, j]), panel, with_labels=j == 0)
        figure.supxlabel(KEY, fontsize=8, color=GREY)
        return save(figure, path, DPI)


def draw_panel(axes: Any, panel: Panel, *, with_labels: bool) -> None:
    """One panel: pale dots for seeds, a line for the interval, its mean full where it excludes 0.

    Without an interval (one seed) the mean is a hollow mark alone.
    """
    axes.axvline(0, color=GREY, linewidth=1)
    for place, row in enumerate(panel.rows):
        mean, colour = row.difference, COLOURS[1] if row.is_patched else COLOURS[0]
        axes.plot(row.by_seed, [place] * len(row.by_seed), "o", color=colour, alpha=0.3, ms=3)
        if mean.low is not None and mean.high is not None:
            axes.plot([mean.low, mean.high], [place, place], color=colour, linewidth=1.4)
        face = colour if mean.excludes_zero else "white"
        axes.plot([mean.mean], [place], "s", color=colour, markerfacecolor=face, ms=4.5)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)  # the first row on top
    axes.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows])
    axes.tick_params(axis="y", length=0, labelleft=with_labels)
    axes.grid(axis="y", visible=False)
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(f"difference to the base, {panel.unit}", fontsize=8)
    axes.set_xlim(*limits(panel.rows))


def limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Left and right end of the x axis: every seed and mean, and intervals up to twice as far.

    With two or three seeds an interval can be far wider than all that was seen; it then runs out of
    the picture, and the table has its ends.
    """
    seen = [value for row in rows for value in (*row.by_seed, row.difference.mean)]
    reach = 2 * max(map(abs, seen)) or 1.0
    ends = [
        end for row in rows for end in (row.difference.low, row.difference.high) if end is not None
    ]
    low = min(0.0, *seen, *(max(end, -reach) for end in ends))
    high = max(0.0, *seen, *(min(end, reach) for end in ends))
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin
