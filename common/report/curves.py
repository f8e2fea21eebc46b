"""Curves as the page draws them: places in an SVG, and the values for the pointer."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.record.terminal import format_number
from common.report.blocks import Line, Panel
from common.report.plots import COLOURS, MARK_BELOW, palette, smoothed

# Edges of the drawing in its own units, which are scaled to the page.
BOX = {"width": 380, "height": 210, "left": 50, "right": 370, "top": 10, "bottom": 174}
MOST_POINTS = 300  # of a curve; what a screen shows of more is the same, and the file is larger
NUM_TICKS = 4
Place = Callable[[Any], Any]  # from a value to the drawing


def drawing(panel: Panel) -> dict[str, Any] | None:
    """What the page's template shows of a panel; None if no value is finite."""
    every = zip(panel.lines, cycle(palette(panel.colour)))
    lines = [(line, COLOURS.index(c)) for line, c in every if np.isfinite(line.y).any()]
    if not lines:
        return None
    y = np.concatenate([[*line.y, *line.low, *line.high] for line, _ in lines])
    x_range = limits(np.concatenate([line.x for line, _ in lines]))
    y_range = limits(y[np.isfinite(y)], margin=0.06)
    x_at = partial(np.interp, xp=x_range, fp=(BOX["left"], BOX["right"]))
    y_at = partial(np.interp, xp=y_range, fp=(BOX["bottom"], BOX["top"]))
    are_steps = all(float(x).is_integer() for line in panel.lines for x in line.x)
    return {
        "panel": panel,
        "lines": [curve(*each, x_at, y_at) for each in lines],
        "x_ticks": [(x_at(t), tick_label(t)) for t in ticks(*x_range, whole=are_steps)],
        "y_ticks": [(y_at(t), tick_label(t)) for t in ticks(*y_range)],
        "range": [*x_range, BOX["left"], BOX["right"], BOX["width"]],
        "values": [pointer_values(line) for line, _ in lines],
    }


def limits(values: NDArray[Any], margin: float = 0.0) -> tuple[float, float]:
    """The range of the values, never empty, a share of it wider at both ends."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        margin = 0.5
    extent = margin * (high - low or abs(high) or 1.0)
    return low - extent, high + extent


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About `NUM_TICKS` round numbers in a range: 1, 2 or 5 times a power of ten apart."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(NUM_TICKS, steps=[1, 2, 5, 10], integer=whole).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(tick) for tick in found if low - slack <= tick <= high + slack]


def tick_label(value: float) -> str:
    """A tick for people."""
    return f"{value:,.6g}".replace("-", "\N{MINUS SIGN}")


def curve(line: Line, colour: int, x_at: Place, y_at: Place) -> dict[str, Any]:
    """Paths of a line by their class, in pale with a moving mean on top where points are many."""
    y = np.where(np.isfinite(line.y), line.y, np.nan)
    x, kept = x_at(line.x), drawn(y)
    smooth = smoothed(line)
    heights = {"line": y} if smooth is None else {"pale": y, "line": np.asarray(smooth)}
    paths = {name: path(x[kept], y_at(each[kept])) for name, each in heights.items()}
    if line.low:  # a stroke for each interval: the gap behind it lifts the pen
        ends = np.stack([line.low, line.high, np.full(len(y), np.nan)], axis=1)
        paths["range"] = path(np.repeat(x, 3), y_at(ends.ravel()))
    dots = np.flatnonzero(np.isfinite(y)) if len(y) <= MARK_BELOW else np.empty(0, int)
    return {
        "label": line.label,
        "colour": colour,
        "last": format_number(float(y[np.isfinite(y)][-1])),
        "paths": paths,
        "dots": list(zip(x[dots], y_at(y[dots]), strict=True)),
    }


def drawn(y: NDArray[Any]) -> list[int]:
    """Which values are drawn, at most `MOST_POINTS`: both ends, and of many the extremes.

    Those of each of equal stretches, and a gap in it, so that no spike and no gap is left out.
    """
    if len(y) <= MOST_POINTS:
        return list(range(len(y)))
    kept = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), MOST_POINTS // 3 - 1):
        own = y[stretch]
        if np.isfinite(own).any():
            kept |= {int(stretch[np.nanargmin(own)]), int(stretch[np.nanargmax(own)])}
        kept |= set(stretch[np.isnan(own)][:1].tolist())
    return sorted(kept)


def path(x: NDArray[Any], y: NDArray[Any]) -> str:
    """Drawing commands; a value that is not finite lifts the pen."""
    commands, is_down = [], False
    for across, up in zip(x, y, strict=True):
        if math.isfinite(up):
            commands.append(f"{'L' if is_down else 'M'}{across:.1f} {up:.1f}")
        is_down = math.isfinite(up)
    return "".join(commands)


def pointer_values(line: Line) -> dict[str, Sequence[Any]]:
    """What the pointer reads: the recorded values, shortened as a person reads them.

    Of many those at even distances, so that all curves of a panel have them at the same steps.
    """
    places = np.linspace(0, len(line.x) - 1, min(len(line.x), MOST_POINTS)).astype(int)
    texts = [format_number(line.y[i]) if math.isfinite(line.y[i]) else "" for i in places]
    return {"x": [line.x[i] for i in places], "y": texts}
