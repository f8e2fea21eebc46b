"""Curves as SVG inside a page: drawn from the recorded numbers, with the values for the pointer."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from common.record.terminal import format_number
from common.report.blocks import Line, Panel
from common.report.escape import shown
from common.report.plots import COLOURS, MARK_BELOW, SMOOTH_ABOVE, moving_mean

WIDTH, HEIGHT = 380, 210  # units of the drawing, scaled to the page
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 36  # margins
MOST_POINTS = 300  # of a curve; what a screen shows of more is the same, and the file is larger
NUM_TICKS = 4


def panel_svg(panel: Panel) -> str:
    """A figure: title, values of the last point, axes and curves. "" if no value is finite."""
    lines = [(index, line) for index, line in enumerate(panel.lines) if any(_finite(line.y))]
    if not lines:
        return ""
    x_range = _padded(x for _, line in lines for x in line.x)
    y_range = _padded((y for _, line in lines for y in _finite(line.y)), margin=0.06)
    parts = [*_axes(panel, x_range, y_range)]
    for index, line in lines:
        parts += _curve(line, index % len(COLOURS), x_range, y_range)
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" hidden></line>')
    data = json.dumps([_data(line, index % len(COLOURS)) for index, line in lines])
    box = json.dumps([*x_range, LEFT, WIDTH - RIGHT, WIDTH])
    readout = " ".join(_last(line, index % len(COLOURS)) for index, line in lines)
    title = shown(panel.title)
    return (
        f'<figure class="panel" tabindex="0" data-lines="{shown(data)}" data-box="{shown(box)}" '
        f'data-x="{shown(panel.x_label)}"><h4>{title}<small>{shown(panel.unit)}</small></h4>'
        f'<p class="readout"><span class="place"></span>{readout}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _padded(values: Iterable[float], margin: float = 0.0) -> tuple[float, float]:
    """The range of the values, never empty, a share of it wider at both ends."""
    known = list(values)
    low, high = min(known), max(known)
    extent = high - low or abs(high) or 1.0
    if low == high:
        margin = 0.5
    return low - margin * extent, high + margin * extent


def ticks(low: float, high: float) -> list[float]:
    """About `NUM_TICKS` round numbers in a range: 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / NUM_TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _scale(value: float, limits: tuple[float, float], start: float, end: float) -> float:
    return start + (value - limits[0]) / (limits[1] - limits[0]) * (end - start)


def _x(value: float, limits: tuple[float, float]) -> float:
    return _scale(value, limits, LEFT, WIDTH - RIGHT)


def _y(value: float, limits: tuple[float, float]) -> float:
    return _scale(value, limits, HEIGHT - BOTTOM, TOP)


def _axes(panel: Panel, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    parts = []
    for value in ticks(*y_range):
        place = f"{_y(value, y_range):.1f}"
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>'
        )
        parts.append(f'<text class="ytick" x="{LEFT - 6}" y="{place}">{_tick(value)}</text>')
    whole = all(float(x).is_integer() for line in panel.lines for x in line.x)  # steps
    for value in ticks(*x_range):
        if whole and not value.is_integer():
            continue
        place = f"{_x(value, x_range):.1f}"
        parts.append(
            f'<text class="xtick" x="{place}" y="{HEIGHT - BOTTOM + 15}">{_tick(value)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = f'<text class="xtick" x="{middle}" y="{HEIGHT - 4}">{shown(panel.x_label)}</text>'
    return [*parts, label]


def _tick(value: float) -> str:
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.6g}".replace("-", "\N{MINUS SIGN}")


def _curve(
    line: Line, colour: int, x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[str]:
    """The points, in pale with a moving mean on top where they are many."""
    values, kept = list(line.y), _places(line.y)
    curves = [("line", values)]
    if len(values) > SMOOTH_ABOVE and not line.exact:
        curves = [("pale", values), ("line", moving_mean(values, len(values) // 30))]
    parts = []
    for kind, heights in curves:
        points = [(line.x[i], heights[i]) for i in kept]
        path = _path(points, x_range, y_range)
        parts.append(f'<path class="{kind} k{colour}" d="{path}"/>')
    if len(values) <= MARK_BELOW:
        places = zip(line.x, values, strict=True)
        dots = [(_x(x, x_range), _y(y, y_range)) for x, y in places if math.isfinite(y)]
        parts += [f'<circle class="k{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in dots]
    return parts


def _places(values: Sequence[float]) -> list[int]:
    """Which values are drawn, at most `MOST_POINTS`: both ends, and of many the extremes.

    Those of each of equal stretches, and a gap in it, so that no spike and no gap is left out.
    """
    if len(values) <= MOST_POINTS:
        return list(range(len(values)))
    num_stretches = MOST_POINTS // 3 - 1
    bounds = [i * len(values) // num_stretches for i in range(num_stretches + 1)]
    kept = {0, len(values) - 1}
    for first, end in pairwise(bounds):
        known = [i for i in range(first, end) if math.isfinite(values[i])]
        gaps = [i for i in range(first, end) if not math.isfinite(values[i])]
        if known:
            kept |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
        kept |= set(gaps[:1])
    return sorted(kept)


def _path(
    points: Sequence[tuple[float, float]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> str:
    """Drawing commands; a value that is not finite lifts the pen."""
    commands, is_down = [], False
    for x, y in points:
        if math.isfinite(y):
            commands.append(f"{'L' if is_down else 'M'}{_x(x, x_range):.1f} {_y(y, y_range):.1f}")
        is_down = math.isfinite(y)
    return "".join(commands)


def _data(line: Line, colour: int) -> dict[str, object]:
    """What the pointer reads: the recorded values, shortened as a person reads them.

    Of many those at even distances, so that all curves of a panel have them at the same steps.
    """
    number = min(len(line.x), MOST_POINTS)
    kept = [i * (len(line.x) - 1) // max(1, number - 1) for i in range(number)]
    texts = [format_number(line.y[i]) if math.isfinite(line.y[i]) else "" for i in kept]
    xs = [line.x[i] for i in kept]
    return {"label": line.label, "colour": colour, "x": xs, "y": texts}


def _last(line: Line, colour: int) -> str:
    value = format_number(_finite(line.y)[-1])
    return (
        f'<span class="key k{colour}"><i></i>{shown(line.label)} '
        f'<b class="value">{shown(value)}</b></span>'
    )
