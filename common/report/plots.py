"""Figures, drawn from what runs and evaluation recorded.

Nothing here computes a result: curves come from `metrics.jsonl`, everything else from
`results.json`. matplotlib is imported where it is used, and only
its Agg canvas: no display, no global state.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.distributed import is_rank0
from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX, PREFIXES
from common.record.jsonl import read_jsonl

# Okabe and Ito (2008): told apart with any colour vision. Dark enough on white, so no yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
GREY = "#666666"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}
DPI = 150
MARK_BELOW = 8  # points; so few are shown as points
SMOOTH_ABOVE = 60  # points; a longer curve is drawn pale with its moving mean on top
EXACT = ("learning_rate", "peak_memory_gb")  # without noise: never smoothed

# Panels of curves.png in order: title, y axis with unit, metrics (a prefix takes all that have it).
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Loss", "loss", ("loss", "eval_loss")),
    ("Preference accuracy", "share of pairs", ("accuracy", "eval_accuracy")),
    ("Pair rewards", "reward", ("chosen_reward", "rejected_reward", "reward_margin")),
    ("Pair log-probabilities", "nats per completion", ("chosen_logp", "rejected_logp")),
    ("Reward", "mean reward", ("reward", "kept_reward")),
    ("Reward functions", "mean, unweighted", (FUNCTION_PREFIX,)),
    ("Logged by reward functions", "mean over the calls", (LOGGED_PREFIX,)),
    ("Reward spread in a group", "standard deviation", ("reward_std",)),
    ("KL to the reference", "nats per completion", ("kl",)),
    ("Sampler against trainer", "nats per token", ("sampler_kl",)),
    ("Completion length", "tokens", ("completion_length",)),
    ("Shares", "share", ("stop_rate", "zero_variance_fraction", "clip_fraction")),
    ("Sampler weights", "share of the tokens", ("sampler_weight_share",)),
    ("Groups replaced", "groups", ("replaced_groups",)),
    ("Advantage of the kept", "mean advantage", ("advantage_mean_kept",)),
    ("Rejection sampling", "candidates", ("effective_sample_size", "candidates_seen")),
    ("Entropy", "nats per token", ("entropy",)),
    ("Gradient norm, before clipping", "norm", ("grad_norm",)),
    ("Learning rate", "learning rate", ("learning_rate",)),
    ("Throughput", "completion tokens / s", ("tokens_per_second",)),
    ("Time of a step", "seconds", ("step_seconds", "sample_seconds")),
    ("Peak memory", "GB", ("peak_memory_gb",)),
)


@contextmanager
def style() -> Iterator[None]:
    """Draw in the project's style, and leave matplotlib's settings as they were."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; a null (a value that was not finite) is a NaN: a gap."""
    points = [(record["step"], record[name]) for record in records if name in record]
    values = [math.nan if value is None else float(value) for _, value in points]
    return [step for step, _ in points], values


def draw_series(
    axes: Any, steps: Sequence[float], values: list[float], *, smooth: bool = True, **line: Any
) -> None:
    """A curve; beyond `SMOOTH_ABOVE` points the points in pale and a moving mean on top."""
    line = {"linewidth": 1.6, **line}
    if len(values) <= SMOOTH_ABOVE or not smooth:
        marker = "o" if len(values) <= MARK_BELOW else None
        axes.plot(steps, values, marker=marker, markersize=3, **line)
        return
    axes.plot(steps, values, color=line["color"], linewidth=0.6, alpha=0.35)
    axes.plot(steps, moving_mean(values, len(values) // 30), **line)


def moving_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean over up to `reach` values on either side, without those that are not finite."""
    known = np.isfinite(values)
    heights, counts = np.where(known, values, 0), np.concatenate([[0], np.cumsum(known)])
    means = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)  # as far on both sides: no bias
        first, end = place - near, place + near + 1
        count = int(counts[end] - counts[first])  # window by window: a running sum keeps a spike
        means.append(float(heights[first:end].sum()) / count if count else math.nan)
    return means


# --- one run ---


def plot_run(output_dir: str | Path) -> list[Path]:
    """Draw `output_dir/plots/curves.png`: one panel per group of metrics the run recorded.

    Returns:
        The files written: none if nothing was recorded, or on other ranks than 0.
    """
    output_dir = Path(output_dir)
    records = read_jsonl(output_dir / "metrics.jsonl") if is_rank0() else []
    panels = [panel for panel in PANELS if recorded(records, panel[2])]
    if not panels:
        return []
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    num_columns = min(3, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    with style():
        figure = Figure(
            figsize=(4 * num_columns, 2.7 * num_rows + 0.5),
            layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08),
        )
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        note = " (bold: moving mean)" if len(records) > SMOOTH_ABOVE else ""
        title = f"Training curves of {output_dir.resolve().name}{note}"
        figure.suptitle(title, fontweight="bold")
        for axes, (title, unit, names) in zip(grid, panels, strict=False):
            _draw_panel(axes, records, title, unit, recorded(records, names))
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        return [save(figure, output_dir / "plots" / "curves.png")]


def recorded(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Which of the metrics the records have; a prefix stands for all that begin with it."""
    present = sorted({name for record in records for name in record})
    found = []
    for name in names:
        if name in PREFIXES:
            found += [other for other in present if other.startswith(name)]
        elif name in present:
            found.append(name)
    return found


def _draw_panel(
    axes: Any, records: Sequence[Mapping[str, Any]], title: str, unit: str, names: Sequence[str]
) -> None:
    for index, name in enumerate(names):
        steps, values = series(records, name)
        line = {"color": COLOURS[index % len(COLOURS)], "label": name}
        draw_series(axes, steps, values, smooth=name not in EXACT, **line)
    axes.set(title=title, ylabel=unit)
    _label_steps(axes)
    axes.margins(x=0.02)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    axes.ticklabel_format(axis="y", useOffset=False)
    if len(names) > 1:
        draw_legend(axes)


def _label_steps(axes: Any) -> None:
    axes.set_xlabel("optimiser step")
    axes.xaxis.get_major_locator().set_params(integer=True)  # of few steps it would label halves


def draw_legend(axes: Any) -> None:
    """A legend above what is drawn, for which the axis is made longer."""
    labels = axes.get_legend_handles_labels()[1]
    num_columns = 2 if max(map(len, labels)) < 20 else 1
    share = 0.05 + 0.13 * math.ceil(len(labels) / num_columns)  # of the height
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + (high - low) * share / (1 - share))
    axes.legend(loc="upper left", ncols=num_columns)


def save(figure: Any, path: Path, dpi: int = DPI) -> Path:
    """Write a picture, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


# --- a chain of runs ---


def summary_figure(
    results: Mapping[str, Any], run_dirs: Mapping[str, Path], output_path: Path
) -> Path:
    """Draw the chain in one picture: accuracy, reward, and how the training went.

    Args:
        results: what `results.json` holds.
        run_dirs: folder of each stage's run by the stage's name, for the curves.
        output_path: the PNG to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with style():
        figure = Figure(figsize=(14, 5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 1.25))
        figure.suptitle(
            f"{dataset_title(results['dataset'])}: held-out, {results['num_pairs']:,} preference "
            "pairs",
            fontweight="bold",
        )
        names = dict.fromkeys([*(system["name"] for system in results["systems"]), *run_dirs])
        colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
        _draw_accuracy(figure.add_subplot(grid[:, 0]), results, colours)
        _draw_reward(figure.add_subplot(grid[:, 1]), results["systems"], colours)
        records = {name: read_jsonl(Path(run) / "metrics.jsonl") for name, run in run_dirs.items()}
        _draw_reward_curves(figure.add_subplot(grid[0, 2]), records)
        _draw_loss_curves(figure.add_subplot(grid[1, 2]), records, colours)
        return save(figure, output_path)


def dataset_title(name: str) -> str:
    """A data set in a title: of a path that leads from the root, the end."""
    return "/".join(Path(name).parts[-2:]) if Path(name).is_absolute() else name


def reward_functions(systems: Sequence[Mapping[str, Any]]) -> list[str]:
    """The judges of completions that are neither reward models, which are systems, nor `gold`."""
    others = {"gold", *(s["name"] for s in systems if s.get("kind") == "reward_model")}
    judges = dict.fromkeys(judge for system in systems for judge in system.get("rewards") or {})
    return [judge for judge in judges if judge not in others]


def _draw_accuracy(axes: Any, results: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    systems = [system for system in results["systems"] if system.get("accuracy")]
    intervals = {
        system["name"]: tuple(100 * system["accuracy"][key] for key in ("accuracy", "low", "high"))
        for system in systems
    }
    _draw_intervals(axes, intervals, colours, "{:.1f}")
    axes.set(title="Preference accuracy, 95% interval", ylabel="% of pairs, a tie counts one half")
    ends = [end for _, low, high in intervals.values() for end in (low, high)] + [50.0]
    attainable = results.get("attainable_accuracy")
    if attainable is not None:
        ends.append(100 * attainable)
        _draw_level(axes, 100 * attainable, f"attainable\n{100 * attainable:.1f}")
    _draw_level(axes, 50.0, "chance\n50")
    margin = 0.1 * (max(ends) - min(ends))
    axes.set_ylim(min(ends) - margin, max(ends) + margin)


def _draw_reward(
    axes: Any, systems: Sequence[Mapping[str, Any]], colours: Mapping[str, str]
) -> None:
    """The mean of the gold reward, else of the first reward function, else reward model."""
    choices = [
        ("Gold reward of completions", "{:.3f}", [s.get("gold_reward") for s in systems]),
        *(
            (f"Reward {judge!r}", "{:.3f}", [(s.get("rewards") or {}).get(judge) for s in systems])
            for judge in reward_functions(systems)
        ),
        ("Reward-model score of completions", "{:.2f}", [s.get("reward") for s in systems]),
    ]
    shown = next((choice for choice in choices if any(choice[2])), None)
    if shown is None:
        _draw_nothing(axes, "Reward", "no system was scored by a reward")
        return
    title, number, found = shown
    intervals = {
        system["name"]: tuple(own[part] for part in ("mean", "low", "high"))
        for system, own in zip(systems, found, strict=True)
        if own
    }
    _draw_intervals(axes, intervals, colours, number)
    axes.set(title=f"{title}, 95% interval", ylabel="mean over the completions")
    axes.margins(y=0.15)


def _draw_intervals(
    axes: Any,
    intervals: Mapping[str, tuple[float, float | None, float | None]],
    colours: Mapping[str, str],
    number: str,
) -> None:
    """A dot for each name, with its interval where it has one and the value beside it."""
    names = list(intervals)
    for index, (name, (value, low, high)) in enumerate(intervals.items()):
        errors = None if low is None or high is None else [[value - low], [high - value]]
        dot = {"fmt": "o", "markersize": 6, "capsize": 4, "color": colours[name]}
        axes.errorbar([index], [value], errors, **dot)
        beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(number.format(value), (index, value), **beside)
    narrow = len(names) > 5 or max((len(name) for name in names), default=0) > 12
    labels = [textwrap.fill(name, 18 if narrow else 8) for name in names]
    place = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if narrow else {}
    axes.set_xticks(range(len(names)), labels, **place)
    axes.set_xlim(-0.5, len(names) - 0.2)
    axes.grid(visible=False, axis="x")


def _draw_level(axes: Any, level: float, label: str) -> None:
    axes.axhline(level, color=GREY, linestyle="--", linewidth=1)
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    axes.annotate(label, (1, level), xytext=(4, 0), fontsize=8, color=GREY, **place)


def _draw_nothing(axes: Any, title: str, text: str) -> None:
    axes.set(title=title, xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", color=GREY, transform=axes.transAxes)


def _draw_reward_curves(axes: Any, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Reward in the runs that sample; each reward function too that is not all of the reward."""
    curves = []
    for run, lines in records.items():
        rewards = series(lines, "reward")
        for name in recorded(lines, ["reward", FUNCTION_PREFIX]):
            if name == "reward" or series(lines, name) != rewards:
                curves.append((run, name, *series(lines, name)))
    if not curves:
        _draw_nothing(axes, "Reward in training", "no run recorded a reward")
        return
    for index, (run, name, steps, values) in enumerate(curves):
        style = "-" if name == "reward" else "--"
        colour, label = COLOURS[index % len(COLOURS)], f"{run}: {name}"
        draw_series(axes, steps, values, color=colour, label=label, linestyle=style)
    axes.set(title="Reward in training", ylabel="mean reward")
    _label_steps(axes)
    draw_legend(axes)


def _draw_loss_curves(
    axes: Any, records: Mapping[str, Sequence[Mapping[str, Any]]], colours: Mapping[str, str]
) -> None:
    """Loss of the runs where it measures progress: not of those that sample their own data.

    The runs differ in length, so the axis is the share of each run.
    """
    runs = [name for name, lines in records.items() if not recorded(lines, ["reward"])]
    runs = [name for name in runs if recorded(records[name], ["loss"])]
    if not runs:
        _draw_nothing(axes, "Training loss", "no run recorded a loss")
        return
    for name in runs:
        steps, values = series(records[name], "loss")
        shares = [100 * step / max(steps[-1], 1) for step in steps]
        label = f"{name} ({steps[-1]:,} steps)"
        draw_series(axes, shares, values, color=colours[name], label=label)
    axes.set(title="Training loss", xlabel="% of the run's steps", ylabel="nats per token or pair")
    draw_legend(axes)
