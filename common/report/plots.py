"""The style of all figures, and the curves of a run, drawn from its `metrics.jsonl`.

Nothing here computes a result. matplotlib is imported where it is used, and only its Agg canvas: no
display, no global state.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from common.distributed import is_rank0
from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX, ends_of, recorded
from common.record.run_folder import read_metrics
from common.record.terminal import ELLIPSIS

Records = Sequence[Mapping[str, Any]]

# Okabe and Ito (2008), distinct with any colour vision. Dark enough on white, so no yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
STAGES = ("reward", "sft", "dpo", "grpo")  # systems of these names have the first colours
GREY = "#666666"
STYLE = Path(__file__).with_name("figures.mplstyle")
DPI = 150
MARK_BELOW = 8  # points; so few are shown as points
SMOOTH_ABOVE = 60  # points; a longer curve is drawn pale with its moving mean on top
EXACT = ("learning_rate", "peak_memory_gb", "eval_")  # beginnings: never smoothed

FUNCTION = "<function>"  # in the title of panels that exist once per reward function
SHARE = "share"  # begins the unit of what lies between 0 and 1
LONGEST_NAME = 30  # characters of a function's name in a title

# Panels of curves.png in order: title, y axis with unit, metrics (a prefix takes all that have it).
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Loss", "loss", ("loss", "eval_loss")),
    ("Preference accuracy", "share of pairs", ("accuracy", "eval_accuracy")),
    ("Pair rewards", "reward", ("chosen_reward", "rejected_reward")),
    ("Reward margin of pairs", "reward", ("reward_margin", "eval_reward_margin")),
    ("Pair log-probabilities", "nats per completion", ("chosen_logp", "rejected_logp")),
    ("Reward", "mean reward", ("reward", "kept_reward", "eval_reward")),
    ("Reward '<function>'", "mean", ("reward/<function>", "eval_reward/<function>")),
    ("Logged by reward functions", "mean over the calls", (LOGGED_PREFIX,)),
    ("Reward spread in a group", "standard deviation", ("reward_std",)),
    ("KL to the reference", "nats per completion", ("kl", "eval_kl")),
    ("Sampler against trainer", "nats per token", ("sampler_kl",)),
    ("Completion length", "tokens", ("completion_length", "eval_completion_length")),
    ("Completions that stopped", "share", ("stop_rate", "eval_stop_rate")),
    ("Shares", "share", ("zero_variance_fraction", "clip_fraction")),
    ("Groups replaced", "groups", ("replaced_groups",)),
    ("Advantage of the kept", "mean advantage", ("advantage_mean_kept",)),
    ("Rejection sampling", "candidates", ("effective_sample_size",)),
    ("Entropy", "nats per token", ("entropy",)),
    ("Gradient norm, before clipping", "norm", ("grad_norm",)),
    ("Learning rate", "learning rate", ("learning_rate",)),
    ("Throughput", "completion tokens / s", ("tokens_per_second",)),
    ("Time of a step", "seconds", ("step_seconds", "sample_seconds")),
    ("Peak memory", "GB", ("peak_memory_gb",)),
)


@dataclass(frozen=True)
class Line:
    """A curve."""

    label: str
    x: Sequence[float]  # optimiser steps, not falling
    y: Sequence[float]  # as many; NaN is a gap
    exact: bool = False  # never smoothed, however many points there are
    low: Sequence[float] = ()  # ends of intervals, NaN where there is none; empty: nowhere
    high: Sequence[float] = ()

    @property
    def is_smoothed(self) -> bool:
        """Whether it is drawn pale with its moving mean on top."""
        return len(self.y) > SMOOTH_ABOVE and not self.exact


@dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes."""

    title: str
    unit: str  # of the y axis
    lines: Sequence[Line]

    @property
    def is_smoothed(self) -> bool:
        """Whether it has a moving mean."""
        return any(line.is_smoothed for line in self.lines)


def system_colours(names: Iterable[str]) -> dict[str, str]:
    """The colour of each system: fixed for a stage, the others by turns."""
    names = list(dict.fromkeys(names))
    fixed = {name: COLOURS[STAGES.index(name)] for name in names if name in STAGES}
    others = cycle([colour for colour in COLOURS if colour not in fixed.values()])
    return {name: fixed.get(name) or next(others) for name in names}


def style() -> Any:
    """A context to draw in the project's style, and leave matplotlib's settings as they were."""
    import matplotlib.style

    return matplotlib.style.context(STYLE)


def save(figure: Any, path: Path, dpi: int = DPI) -> Path:
    """Write a picture, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


def titled_figure(title: str, width: float, height: float) -> Any:
    """A figure of so many inches; without a title no room is kept for one."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(width, height), layout=layout)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


# --- curves ---


def recorded_line(records: Records, name: str) -> Line:
    """The curve of a metric with its 95% intervals, if they were recorded; a null is a gap."""
    records = [record for record in records if name in record]
    y, low, high = (
        [math.nan if record.get(key) is None else float(record[key]) for record in records]
        for key in (name, *ends_of(name))
    )
    if not np.isfinite([low, high]).any():
        low, high = [], []
    steps = [record["step"] for record in records]
    return Line(name, steps, y, exact=name.startswith(EXACT), low=low, high=high)


def curve_panels(records: Records) -> list[Panel]:
    """The panels of `PANELS` with recorded metrics."""
    rewards = recorded(records, (FUNCTION_PREFIX,))
    functions = [name.removeprefix(FUNCTION_PREFIX) for name in rewards]
    panels = []
    for title, unit, names in PANELS:
        for function in functions if FUNCTION in title else [""]:
            metrics = recorded(records, [name.replace(FUNCTION, function) for name in names])
            lines = [recorded_line(records, name) for name in metrics]
            full_title = title.replace(FUNCTION, cut(function))
            panels += [Panel(full_title, unit, lines)] if lines else []
    return panels


def cut(name: str) -> str:
    """A name as a title has room for."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + ELLIPSIS


def draw_panel(axes: Any, panel: Panel, colours: Sequence[str] = COLOURS) -> None:
    """The curves of a panel, in these colours by turns; long ones below their mean."""
    for line, colour in zip(panel.lines, cycle(colours)):
        look = {"color": colour, "label": line.label, "linewidth": 1.6}
        if line.is_smoothed:
            reach = len(line.y) // 30  # points on either side; a trend stays where it is
            means = np.convolve(line.y, np.full(2 * reach + 1, 1 / (2 * reach + 1)), "valid")
            axes.plot(line.x, line.y, color=colour, linewidth=0.6, alpha=0.35)
            axes.plot(line.x[reach:-reach], means, **look)
        else:
            marker = "o" if len(line.y) <= MARK_BELOW or line.low else None
            axes.plot(line.x, line.y, marker=marker, markersize=3, **look)
        if line.low:
            axes.vlines(line.x, line.low, line.high, color=colour, linewidth=1.2, alpha=0.5)
    axes.set(title=panel.title, ylabel=panel.unit, xlabel="optimiser step")
    axes.xaxis.get_major_locator().set_params(integer=True)  # of few steps it would label halves
    axes.margins(x=0.02)
    steps = {step for line in panel.lines for step in line.x}
    if len(steps) == 1:  # around which the axis would be a tenth of a step wide
        axes.set(xticks=[*steps], xlim=(min(steps) - 0.5, max(steps) + 0.5))
    if panel.unit.startswith(SHARE):
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(1, high))
        for drawn in axes.get_lines():
            drawn.set_clip_on(False)  # whole also at 0 and 1
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    axes.ticklabel_format(axis="y", useOffset=False)


def has_moving_means(output_dir: Path) -> bool:
    """Whether `curves.png` of a run has a moving mean."""
    return any(panel.is_smoothed for panel in curve_panels(read_metrics(output_dir)))


def plot_run(output_dir: str | Path) -> list[Path]:
    """Draw `output_dir/plots/curves.png`: a panel per group of recorded metrics. On rank 0 only."""
    output_dir = Path(output_dir)
    records = read_metrics(output_dir) if is_rank0() else []
    name = output_dir.resolve().name
    panels = curve_panels(records)
    if not panels:
        return []
    colour_of_run = system_colours([name])[name]
    colours = sorted(COLOURS, key=lambda colour: colour != colour_of_run)  # the run's first
    note = " (bold: moving mean)" if any(panel.is_smoothed for panel in panels) else ""
    title = f"Training curves of {name}{note}"
    num_columns = min(3, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    with style():
        figure = titled_figure(title, 4 * num_columns, 2.7 * num_rows + 0.5)
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(num_rows, num_columns, number)
            draw_panel(axes, panel, colours)
            if len(panel.lines) > 1:
                axes.legend()
        return [save(figure, output_dir / "plots" / "curves.png")]
