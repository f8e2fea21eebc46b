"""The second task: reward over steps and over KL, GRPO beside the best of n.

`tables.py` draws `assets/one-sentence.png` from what is recorded of the recipe `one-sentence`, and
has its tables. The best of n samples of the chat model has as its mean reward, a check being 0 or
1, the model's pass@n, and a KL of at most log n - (n - 1) / n, the point that is drawn: where
several samples pass, one of them is taken at random, and the KL is smaller.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.record.jsonl import read_jsonl
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from common.report.plots import COLOURS, save, style, titled_figure
from experiments.outcomes import over_seeds
from experiments.overoptimization.curves import best_of_n_kl
from experiments.records import make
from experiments.records.chains import evaluations, over
from experiments.sweep.effects import DPI

PART = "one-sentence"
CHECK = "one_sentence"


@dataclass(frozen=True)
class Point:
    """A policy: values by seed."""

    name: str
    rewards: tuple[float, ...]  # share of completions that pass
    kls: tuple[float, ...] = ()  # nats per completion; of the best of n the bound
    n: int = 0  # of the best of n

    def row(self) -> list[str]:
        """Its line of the table: means over seeds with Student's 95% interval."""
        kl = over(self.kls) if self.kls else NOT_MEASURED
        return [
            self.name,
            f"at most {self.kls[0]:.2f}" if self.n > 1 else kl,
            over((100 * reward for reward in self.rewards), 1),
            str(len(self.rewards)),
        ]


@dataclass(frozen=True)
class Record:
    """What is recorded of all seeds."""

    run: dict[int, Point]  # GRPO, by the step of each evaluation
    trained: Point  # at its end, with more samples of each prompt
    best: dict[int, Point]  # of n samples of the chat model
    author: Point


def read() -> Record:
    """The record."""
    found = evaluations(PART)
    curves = [list(held_out(make.RECORDS / PART / f"seed_{seed}")) for seed in found]
    run = {}
    for at in zip(*curves, strict=True):
        (step,) = {one[0] for one in at}
        rewards, kls = zip(*(one[1:] for one in at), strict=True)
        run[step] = Point(f"GRPO, step {step}", rewards, kls)
    trained, starts = [], []
    for results in found.values():
        passes = {system["name"]: system["pass_rates"][CHECK] for system in results["systems"]}
        rates = {of: {k: own["mean"] for k, own in rate.items()} for of, rate in passes.items()}
        trained.append(rates.pop("grpo"))
        (start,) = rates.values()  # the chat model
        starts.append(start)
    best = {}
    for name in starts[0]:
        n = int(name.removeprefix("pass@"))
        rewards = tuple(start[name] for start in starts)
        policy = f"best of {n}" if n > 1 else "the chat model"
        best[n] = Point(policy, rewards, (best_of_n_kl(n),) * len(rewards), n)
    own = (results["reference_completions"]["rewards"][CHECK] for results in found.values())
    return Record(
        run,
        Point(
            f"GRPO, trained, {max(best)} samples",
            tuple(rates["pass@1"] for rates in trained),
            run[max(run)].kls,
        ),
        best,
        Point("the author", tuple(rate["mean"] for rate in own)),
    )


def held_out(seed: Path) -> Iterator[tuple[int, float, float]]:
    """Step, reward and KL of the evaluations of a run."""
    for record in read_jsonl(seed / "grpo" / "metrics.jsonl"):
        if "eval_reward" in record:
            yield record["step"], record["eval_reward"], record["eval_kl"]


def shown() -> str:
    """The picture, and the table of all policies."""
    picture = f"![Held-out reward over steps and over KL](../assets/{PART}.png)"
    found = read()
    policies = [*found.run.values(), found.trained, *found.best.values(), found.author]
    return f"{picture}\n\n{table(policies)}"


def short() -> str:
    """The chat model, the best of its most samples, and what was trained."""
    found = read()
    return table([found.best[1], found.best[max(found.best)], found.trained])


def table(policies: list[Point]) -> str:
    """A line per policy."""
    heads = ["policy", "KL at temperature 0.7 [95%]", "passes, % [95%]", "seeds"]
    return markdown.table(heads, [policy.row() for policy in policies])


def beside() -> str:
    """Differences of the same seed: what GRPO gained, and where it is beside the best of n.

    The last is at GRPO's first evaluation that is on every seed farther away than the best of most
    samples can be.
    """
    found = read()
    most = found.best[max(found.best)]
    farther = (own for own in found.run.values() if min(own.kls) > most.kls[0])
    rows = [
        [
            f"{own.name}, beside {other.name}",
            over((100 * (a - b) for a, b in zip(own.rewards, other.rewards, strict=True)), 1),
        ]
        for own, other in [
            (found.trained, found.best[1]),
            (found.trained, most),
            *((own, most) for own in list(farther)[:1]),
        ]
    ]
    return markdown.table(["difference by seed", "passes, points [95%]"], rows)


def draw() -> Path:
    """One panel below the other, for a phone: seeds thin, means with intervals."""
    found = read()
    run, best, trained = found.run.values(), found.best.values(), found.trained
    thin = {"color": COLOURS[0], "linewidth": 0.8, "alpha": 0.6}
    end = {"color": "black", "fmt": "D", "label": f"trained, {max(found.best)} samples a prompt"}
    with style():
        figure = titled_figure("One short sentence: held-out share that passes", 5, 6.6)
        over_steps, over_kl = figure.subplots(2, 1, sharey=True)
        over_steps.plot(list(found.run), [own.rewards for own in run], **thin)
        look = {"color": COLOURS[0], "fmt": "o-", "label": "mean, 1 sample a prompt"}
        draw_means(over_steps, list(found.run), run, look)
        draw_means(over_steps, [max(found.run) + 1], [trained], end)
        over_steps.set(title="GRPO over training", xlabel="step", ylabel="share that passes")
        lines = over_kl.plot([own.kls for own in run], [own.rewards for own in run], **thin)
        lines[0].set_label("GRPO, a seed")
        over_kl.plot(trained.kls, trained.rewards, "D", color="black", label="trained")
        look = {"color": COLOURS[1], "fmt": "s--", "label": "best of n, mean"}
        draw_means(over_kl, [own.kls[0] for own in best], best, look)
        for own in best:
            where = {"xytext": (5, -3), "textcoords": "offset points", "fontsize": 8}
            over_kl.annotate(str(own.n), (own.kls[0], over_seeds(own.rewards).mean), **where)
        label = "KL to the chat model, nats per completion (best of n: at most)"
        over_kl.set(title="Over the distance", xlabel=label, ylabel="share that passes")
        over_steps.legend(loc="upper left")
        over_kl.legend(loc="lower right")
        over_steps.set_ylim(bottom=0)
        return save(figure, make.ROOT / "assets" / f"{PART}.png", DPI)


def draw_means(
    axes: Any, places: list[float], policies: Iterable[Point], look: dict[str, Any]
) -> None:
    """Means over seeds with Student's 95% interval; one seed has none."""
    means = [over_seeds(own.rewards) for own in policies]
    halves = [mean.mean - mean.low if mean.low is not None else 0 for mean in means]
    axes.errorbar(places, [mean.mean for mean in means], halves, elinewidth=1.2, **look)
