"""The effects of a sweep and their forest plot: differences to the base with their intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.report.plots import COLOURS, GREY, save, style
from experiments.runs.outcomes import SeedMean, about, over_seeds
from experiments.runs.power import Power, power_of
from experiments.runs.sweep.sweep_file import Variant

DPI = 110  # of a picture of many rows
ROW_HEIGHT, PANEL_HEIGHT = 0.24, 0.85  # inches; of a panel without its rows: title and axis
PANEL_WIDTH, LABEL_WIDTH = 2.6, 3.2  # inches
KEY = (
    "square: mean over seeds, filled where its 95% interval excludes 0; dots: seeds; orange: a "
    "patch; thin line: the interval that holds together with those of all other lines"
)
CUT = "; arrowhead: the interval goes on"


@dataclass(frozen=True)
class Effect:
    """The difference that a variant makes to one outcome."""

    variant: Variant
    outcome: str
    values: Sequence[float]  # by seed
    base: Sequence[float]  # by seed
    family: int = 0  # number of effects that are tested together, this one included; 0: secondary

    @property
    def by_seed(self) -> list[float]:
        """The differences to the base of the same seed: what both share cancels."""
        return [value - start for value, start in zip(self.values, self.base, strict=True)]

    @property
    def difference(self) -> SeedMean:
        """Their mean over the seeds."""
        return over_seeds(self.by_seed)

    @property
    def power(self) -> Power:
        """The power of the single interval."""
        return power_of(self.difference)

    @property
    def together(self) -> SeedMean:
        """The same with its simultaneous interval; of a secondary outcome with its single one."""
        return over_seeds(self.by_seed, self.family or 1)

    @property
    def cell(self) -> str:
        """The difference, with a second star where the simultaneous interval excludes 0 too."""
        is_clear = self.family and self.together.excludes_zero
        return self.difference.difference + ("*" if is_clear else "")

    @property
    def verdict(self) -> str:
        """By the simultaneous interval, empty without one: yes, or how large the effect may be."""
        mean = self.together
        if not self.family or mean.low is None or mean.high is None:
            return ""
        most = max(abs(mean.low), abs(mean.high))
        return "yes" if mean.excludes_zero else f"no larger than {most:.2f}"


Effects = Mapping[str, Mapping[str, Sequence[Effect]]]  # by stage and outcome, one of each variant


def effect_records(stages: Effects) -> list[dict[str, Any]]:
    """Every effect, ready for JSON."""
    by_outcome = [effects for panels in stages.values() for effects in panels.values()]
    return [
        {
            **asdict(effect.variant),
            "outcome": effect.outcome,
            "unit": about(effect.outcome).unit,
            "by_seed": effect.values,
            "base_by_seed": effect.base,
            "difference": asdict(effect.difference),
            "together": asdict(effect.together) | {"family": effect.family},
            "verdict": effect.verdict,
            "power": asdict(effect.power),
        }
        for effects in by_outcome
        for effect in effects
    ]


def draw(stages: Effects, path: Path) -> Path:
    """Draw the effects, a row of panels for each stage, a panel for each outcome."""
    from matplotlib.figure import Figure

    num_rows = [len(next(iter(panels.values()))) for panels in stages.values()]
    heights = [PANEL_HEIGHT + ROW_HEIGHT * number for number in num_rows]
    num_columns = max(map(len, stages.values()))
    size = (LABEL_WIDTH + PANEL_WIDTH * num_columns, sum(heights))
    with style():
        figure = Figure(figsize=size, layout="constrained")
        grid, is_cut = figure.add_gridspec(len(stages), num_columns, height_ratios=heights), False
        for i, (stage, panels) in enumerate(stages.items()):
            for j, (outcome, effects) in enumerate(panels.items()):
                axes = figure.add_subplot(grid[i, j])
                is_cut |= draw_panel(axes, effects, with_labels=j == 0)
                title = f"{stage}: " if stage != outcome else ""
                axes.set_title(title + about(outcome).label, fontsize=9)
                axes.set_xlabel(f"difference to the base, {about(outcome).unit}", fontsize=8)
        figure.supxlabel(KEY + CUT * is_cut, fontsize=8, color=GREY, wrap=True)
        return save(figure, path, DPI)


def draw_panel(axes: Any, effects: Sequence[Effect], *, with_labels: bool) -> bool:
    """One panel: pale dots for seeds, a line for the interval, its mean full where it excludes 0.

    Without an interval (one seed) the mean is a hollow mark. With two or three seeds an interval
    can be far wider than the seeds' values: it is shown up to twice as far, with an arrowhead where
    it goes on; the table has its ends.

    Returns:
        Whether an interval goes on beyond the axis.
    """
    from matplotlib.markers import CARETLEFT, CARETRIGHT  # whose point is at the axis

    axes.axvline(0, color=GREY, linewidth=1)
    seen = [0.0, *(value for effect in effects for value in effect.by_seed)]
    reach = 2 * max(map(abs, seen)) or 1.0
    for row, effect in enumerate(effects):
        mean, colour = effect.difference, COLOURS[1 if effect.variant.patch else 0]
        seeds = effect.by_seed
        axes.plot(seeds, [row] * len(seeds), "o", color=colour, alpha=0.3, ms=3)
        for interval, width in ((mean, 1.4), (effect.together, 0.6)):
            if interval.low is not None and interval.high is not None:
                ends = [interval.low, interval.high]
                axes.plot(ends, [row, row], color=colour, linewidth=width)
                seen += [max(-reach, interval.low), min(interval.high, reach)]
        face = colour if mean.excludes_zero else "white"
        axes.plot([mean.mean], [row], "s", color=colour, markerfacecolor=face, ms=4.5)
    margin = 0.05 * (max(seen) - min(seen)) or 1.0
    left, right = min(seen) - margin, max(seen) + margin
    axes.set_xlim(left, right)
    is_cut = False
    for row, effect in enumerate(effects):
        colour = COLOURS[1 if effect.variant.patch else 0]
        for interval in (effect.difference, effect.together):
            if interval.low is None or interval.high is None:
                continue
            for end, head in ((left, CARETLEFT), (right, CARETRIGHT)):
                if interval.low < end < interval.high:
                    axes.plot([end], [row], marker=head, color=colour)
                    is_cut = True
    axes.set_ylim(len(effects) - 0.4, -0.6)  # the first row on top
    labels = [f"{effect.variant.detail}: {effect.variant.choice}" for effect in effects]
    axes.set_yticks(range(len(effects)), labels)
    axes.tick_params(axis="y", length=0, labelleft=with_labels)
    axes.grid(axis="y", visible=False)
    return is_cut
