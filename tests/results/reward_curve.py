"""The second task: reward over steps and over KL, GRPO beside the best of n.

`tables.py` draws `assets/one-sentence.png` from what is recorded of the recipe `one-sentence`, and
has its table. The best of n samples of the chat model has as its mean reward, a check being 0 or
1, the model's pass@n, and a KL of at most log n - (n - 1) / n, the point that is drawn: where
several samples pass, one of them is taken at random, and the KL is smaller.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.evaluation.intervals import interval_cell
from common.experiments.outcomes import SeedMean, over_seeds
from common.experiments.overoptimization.curves import best_of_n_kl
from common.record.jsonl import read_jsonl
from common.report import markdown
from common.report.plots import COLOURS, save, style, titled_figure
from tests.results import make

PART = "one-sentence"
CHECK = "one_sentence"
DPI = 110


@dataclass(frozen=True)
class Point:
    """A policy: values by seed, and their mean over seeds."""

    name: str
    step: int | None  # None of the best of n
    kls: tuple[float, ...]  # nats per completion; of the best of n the bound
    rewards: tuple[float, ...]  # share of completions that pass

    @property
    def kl(self) -> SeedMean:
        """Over seeds."""
        return over_seeds(self.kls)

    @property
    def reward(self) -> SeedMean:
        """Over seeds."""
        return over_seeds(self.rewards)


def points(folder: Path) -> list[Point]:
    """GRPO at each evaluation and at its end, then the best of n, of all recorded seeds."""
    seeds = sorted(folder.glob("seed_*"))
    curves = [list(held_out(seed)) for seed in seeds]  # S lists of (step, KL, reward)
    found = []
    for at in zip(*curves, strict=True):
        (step,) = {one[0] for one in at}
        found.append(Point(f"GRPO, step {step}", step, *zip(*(one[1:] for one in at), strict=True)))
    results = [json.loads((seed / "evaluation" / "results.json").read_text()) for seed in seeds]
    starts = [
        system["pass_rates"][CHECK]
        for one in results
        for system in one["systems"]
        if system["name"] != "grpo"  # the chat model
    ]
    for name in starts[0]:
        n = int(name.removeprefix("pass@"))
        rewards = tuple(start[name]["mean"] for start in starts)
        found.append(Point(f"best of {n}", None, (best_of_n_kl(n),) * len(seeds), rewards))
    return found


def held_out(seed: Path) -> Iterator[tuple[int, float, float]]:
    """Step, KL and reward of the evaluations of a run."""
    for record in read_jsonl(seed / "grpo" / "metrics.jsonl"):
        if "eval_reward" in record:
            yield record["step"], record["eval_kl"], record["eval_reward"]


def shown() -> str:
    """The picture, and the table of all policies."""
    return f"![Held-out reward over steps and over KL](../assets/{PART}.png)\n\n{table()}"


def table(*, is_short: bool = False) -> str:
    """A line per policy: means over seeds with Student's 95% interval.

    The short one has GRPO's first and last, and the best of most samples that is no farther away.
    """
    found, rows = points(make.RECORDS / PART), []
    if is_short:
        run = [point for point in found if point.step is not None]
        best = found[len(run) :]
        near = [point for point in best if point.kl.mean <= run[-1].kl.mean] or best
        found = [run[0], near[-1], run[-1]]
    for point in found:
        kl = f"at most {point.kl.mean:.2f}" if point.step is None else cell(point.kl, 1, 2)
        rows.append([point.name, kl, cell(point.reward, 100, 1), str(point.reward.n)])
    return markdown.table(["policy", "KL, nats [95%]", "passes, % [95%]", "seeds"], rows)


def cell(mean: SeedMean, scale: float, digits: int) -> str:
    """A mean with its interval."""
    return interval_cell(asdict(mean), scale, digits)


def draw() -> Path:
    """Seeds thin, their mean thick with its interval; one panel below the other, for a phone."""
    found = points(make.RECORDS / PART)
    run = [point for point in found if point.step is not None]
    best = [point for point in found if point.step is None]
    with style():
        figure = titled_figure("One short sentence: held-out share that passes", 5, 6.6)
        over_steps, over_kl = figure.subplots(2, 1, sharey=True)
        draw_run(over_steps, run, lambda point: [point.step] * len(point.rewards))
        over_steps.set(title="Over training", xlabel="step", ylabel="share that passes")
        draw_run(over_kl, run, lambda point: point.kls)
        means = [point.reward.mean for point in best]
        over_kl.plot([p.kl.mean for p in best], means, "s--", color=COLOURS[1], label="best of n")
        for point, mean in zip(best, means, strict=True):
            where = {"xytext": (5, -9), "textcoords": "offset points", "fontsize": 8}
            over_kl.annotate(point.name.split()[-1], (point.kl.mean, mean), **where)
        label = "KL to the chat model, nats per completion (best of n: at most)"
        over_kl.set(title="Over the distance", xlabel=label, ylabel="share that passes")
        over_kl.legend(loc="upper left")
        over_steps.set_ylim(bottom=0)
        return save(figure, make.ROOT / "assets" / f"{PART}.png", DPI)


def draw_run(axes: Any, run: list[Point], places: Callable[[Point], Any]) -> None:
    """GRPO's seeds and their mean over what `places` gives of a point, a value per seed."""
    across = [places(point) for point in run]
    look = {"color": COLOURS[0]}
    axes.plot(across, [point.rewards for point in run], linewidth=0.8, alpha=0.4, **look)
    middle = [sum(one) / len(one) for one in across]
    means = [point.reward for point in run]
    axes.plot(middle, [mean.mean for mean in means], "o-", linewidth=2.2, label="GRPO", **look)
    ends = [(mean.low, mean.high) for mean in means if mean.low is not None]
    if len(ends) == len(run):
        axes.vlines(middle, *zip(*ends, strict=True), linewidth=1.2, alpha=0.6, **look)
