"""The second task: reward over steps and over KL, GRPO compared with the best of n.

The best of n samples of the chat model has its pass@n as mean reward: a check is 0 or 1. Their
KL is at most log n - (n - 1) / n, the point that is drawn: where several samples pass, one of them
is taken at random, and the KL is smaller.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.record.jsonl import read_jsonl
from common.record.run_folder import read_metrics
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from common.report.plots import COLOURS, save, style, titled_figure
from experiments.evidence.records import studies
from experiments.evidence.records.replications import evaluations
from experiments.runs.outcomes import over, over_seeds
from experiments.runs.overoptimization.curves import best_of_n_kl
from experiments.runs.sweep.effects import DPI

PART = "one-sentence"
CHECK = "one_sentence"
TITLE = re.compile(r"words:\n\n(.+)")  # in its prompts


@dataclass(frozen=True)
class Point:
    """A policy: values by seed."""

    name: str
    rewards: Sequence[float]  # share of completions that pass
    kls: Sequence[float] = ()  # nats per completion
    is_bound: bool = False  # whether these are upper bounds

    def row(self) -> list[str]:
        """Its line of the table: means over seeds with Student's 95% interval."""
        kl = over(self.kls) if self.kls else NOT_MEASURED
        rewards = over((100 * reward for reward in self.rewards), 1)
        kl = f"at most {self.kls[0]:.2f}" if self.is_bound else kl
        return [self.name, kl, rewards, str(len(self.rewards))]


@dataclass(frozen=True)
class Record:
    """The policies of all seeds."""

    run: dict[int, Point]  # GRPO, by the step of each evaluation
    trained: Point  # at its end, with more samples of each prompt
    best: dict[int, Point]  # of n samples of the chat model
    author: Point


def read() -> Record:
    """The record."""
    found = evaluations(PART)
    logs = [read_metrics(studies.RECORDS / PART / f"seed_{seed}" / "grpo") for seed in found]
    run = {}
    for at in zip(*([line for line in log if "eval_reward" in line] for log in logs), strict=True):
        rewards, kls = ([line[name] for line in at] for name in ("eval_reward", "eval_kl"))
        run[at[0]["step"]] = Point(f"GRPO, step {at[0]['step']}", rewards, kls)
    systems = [system for results in found.values() for system in results.systems]
    by_name = [(s.name, s.generations.pass_rates[CHECK]) for s in systems if s.generations]
    grpo = [rates for name, rates in by_name if name == "grpo"]
    chat = [rates for name, rates in by_name if name != "grpo"]
    best = {}
    for name in chat[0]:
        n = int(name.removeprefix("pass@"))
        policy = f"best of {n}" if n > 1 else "the chat model"
        passes = [rate.mean for rates in chat if (rate := rates[name])]
        best[n] = Point(policy, passes, [best_of_n_kl(n)] * len(passes), is_bound=n > 1)
    references = [results.reference_completions for results in found.values()]
    rewards_of_author = [own.rewards[CHECK] for own in references if own]
    passes = [rate.mean for rates in grpo if (rate := rates["pass@1"])]
    return Record(
        run,
        Point(f"GRPO, trained, {max(best)} samples", passes, run[max(run)].kls),
        best,
        Point("the author", [reward.mean for reward in rewards_of_author if reward]),
    )


def shown() -> str:
    """The picture, and the table of policies: of GRPO's evaluations every second one."""
    picture = f"![Held-out reward over steps and over KL](../assets/{PART}.png)"
    found = read()
    policies = [*list(found.run.values())[::2], found.trained, *found.best.values(), found.author]
    heads = ["policy", "KL at temperature 0.7 [95%]", "passes, % [95%]", "seeds"]
    return f"{picture}\n\n{markdown.table(heads, [policy.row() for policy in policies])}"


def differences() -> str:
    """Differences of the same seed: GRPO's gain, and GRPO compared with the best of n.

    The last is at GRPO's first evaluation that is on every seed farther away than the best of most
    samples can be.
    """
    found = read()
    most = found.best[max(found.best)]
    farther = [own for own in found.run.values() if min(own.kls) > most.kls[0]]
    pairs = [(found.trained, found.best[1]), (found.trained, most)]
    rows = []
    for own, other in [*pairs, *((own, most) for own in farther[:1])]:
        points = [100 * (a - b) for a, b in zip(own.rewards, other.rewards, strict=True)]
        rows.append([f"{own.name}, compared with {other.name}", over(points, 1)])
    return markdown.table(["difference by seed", "passes, points [95%]"], rows)


def sample() -> str:
    """Summaries of the first abstract by every system."""
    line = read_jsonl(studies.RECORDS / PART / "samples.jsonl")[0]
    title = TITLE.findall(line["prompt"])[0]
    rows = [["author", line["reference"]["completion"]]]
    for name, completion in line["systems"].items():
        is_cut = not completion["stopped"]
        rows.append([name, completion["completion"] + (" [...]" if is_cut else "")])
    return markdown.table(["summary by", title], rows)


def draw() -> Path:
    """One panel below the other: seeds thin, means with intervals."""
    found = read()
    run, best, trained = found.run.values(), found.best.values(), found.trained
    thin = {"color": COLOURS[0], "linewidth": 0.8, "alpha": 0.6}
    look = {"color": COLOURS[0], "fmt": "o-", "label": "mean, 1 sample a prompt"}
    end = {"color": "black", "fmt": "D", "label": f"trained, {max(found.best)} samples a prompt"}
    with style():
        figure = titled_figure("One short sentence: held-out share that passes", 5, 6.6)
        over_steps, over_kl = figure.subplots(2, 1, sharey=True)
        over_steps.plot(list(found.run), [own.rewards for own in run], **thin)
        draw_means(over_steps, list(found.run), run, look)
        draw_means(over_steps, [max(found.run) + 1], [trained], end)
        over_steps.set(title="GRPO over training", xlabel="step", ylabel="share that passes")
        lines = over_kl.plot([own.kls for own in run], [own.rewards for own in run], **thin)
        lines[0].set_label("GRPO, a seed")
        over_kl.plot(trained.kls, trained.rewards, "D", color="black", label="trained")
        look = {"color": COLOURS[1], "fmt": "s--", "label": "best of n, mean"}
        draw_means(over_kl, [own.kls[0] for own in best], best, look)
        for n, own in found.best.items():
            where = {"xytext": (5, -3), "textcoords": "offset points", "fontsize": 8}
            over_kl.annotate(str(n), (own.kls[0], over_seeds(own.rewards).mean), **where)
        label = "KL to the chat model, nats per completion (best of n: at most)"
        over_kl.set(title="Over the distance", xlabel=label, ylabel="share that passes")
        over_steps.legend(loc="upper left")
        over_kl.legend(loc="lower right")
        over_steps.set_ylim(bottom=0)
        return save(figure, studies.ROOT / "assets" / f"{PART}.png", DPI)


def draw_means(
    axes: Any, places: list[float], policies: Iterable[Point], look: dict[str, Any]
) -> None:
    """Means over seeds with Student's 95% interval; one seed has none."""
    means = [over_seeds(own.rewards) for own in policies]
    halves = [mean.mean - mean.low if mean.low is not None else 0 for mean in means]
    axes.errorbar(places, [mean.mean for mean in means], halves, elinewidth=1.2, **look)


TABLES: dict[str, Callable[[], str]] = {
    PART: shown,
    f"{PART}.differences": differences,
    f"{PART}.samples": sample,
}
FIGURES = {PART: draw}
