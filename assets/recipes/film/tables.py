"""The recipe `film`: reward models by their number of votes, and methods at the same KL.

All seeds have the same test rows and prompts. So a value is a table of seeds by rows, both drawn at
random, and its interval covers both draws (`Crossed`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from assets.recipes.film.measured import Recorded
from common.evaluation.accuracy import Interval, outcomes
from common.evaluation.intervals import t_quantile
from common.evaluation.records import read_scores
from common.record.terminal import NOT_MEASURED
from common.report import markdown
from common.report.plots import COLOURS, GREY, save, style, titled_figure
from common.report.tables import interval_cell
from experiments.evidence.records import studies
from experiments.runs.outcomes import over
from experiments.runs.overoptimization import report
from experiments.runs.overoptimization.curves import Values, distance
from experiments.runs.overoptimization.summary import (
    Measured,
    Point,
    SeedPoints,
    summarise,
    tracks_of,
)
from experiments.runs.power import HEADERS, detectable
from experiments.runs.sweep.effects import DPI

SEEDS, BFLOAT16 = ("film-0", "film-1", "film-2"), ("film-bf16",)
SIZES = (1, 4, 16, 64)  # of best of n
VOTES = {"reward-250": 250, "reward-500": 500, "reward-1000": 1000, "reward": 2000}
GOLD = "reward-gold"
NAMES = {name: f"{votes:,} votes" for name, votes in VOTES.items()} | {
    "reward": "2,000 votes: the proxy",
    GOLD: "3,000 votes, other half: gold",
}
EVALUATIONS = {"votes": "evaluation", "means": "evaluation-means"}
PENALTY = -1.0  # the experiment's missing_eos_penalty
TICKS = (0.5, 1, 2, 5, 10)  # of the figure's KL
MARKERS = {"0.03": "o", "0.1": "s", "0.3": "^"}  # of GRPO's policies by beta
KLS = (1.0, 2.0, 5.0, 10.0)  # nats per completion; 1 was added when DPO's results were seen
# Methods by the names of their tracks. Of GRPO each beta is a track.
METHODS = {
    "best of n": re.compile("best_of_n"),
    "SFT on the best of 16": re.compile("rejection"),
    "DPO": re.compile("dpo"),
    "GRPO": re.compile(r"grpo beta=[\d.]+"),
    "GRPO with rejection": re.compile(r"grpo beta=[\d.]+ num_candidates=\d+"),
}
COMPARED = [
    *((method, "best of n") for method in list(METHODS)[1:]),
    *(("GRPO", "DPO"), ("GRPO with rejection", "DPO"), ("GRPO with rejection", "GRPO")),
]


@dataclass(frozen=True)
class Crossed:
    """The mean of (S, R) values of seeds and rows, with an interval over both.

    The variance of a mean over two crossed random factors (Searle, Casella and McCulloch 1992,
    section 4.3), with Student's quantile at Satterthwaite's degrees of freedom (1946). Of one seed
    the interval covers the rows only.
    """

    values: Values

    def error(self) -> tuple[float, float]:
        """Standard error of the mean, and its degrees of freedom."""
        num_seeds, num_rows = self.values.shape
        mean = float(self.values.mean())
        by_seed, by_row = self.values.mean(1, keepdims=True), self.values.mean(0)
        residuals = self.values - by_seed - by_row + mean
        degrees = np.array([num_seeds - 1, num_rows - 1, (num_seeds - 1) * (num_rows - 1)])
        squares = [num_rows * (by_seed - mean) ** 2, num_seeds * (by_row - mean) ** 2, residuals**2]
        sums = np.array([square.sum() for square in squares])
        seeds, rows, both = sums / np.maximum(degrees, 1)  # mean squares
        total = max(seeds + rows - both, seeds, rows)
        weights = np.array([seeds, rows, both]) ** 2 / np.maximum(degrees, 1)
        return sqrt(total / self.values.size), total**2 / weights.sum() if total else 1.0

    def interval(self, family: int = 1) -> dict[str, float]:
        """`mean`, `low` and `high` of 95%, of a whole family of intervals together."""
        mean, (error, freedom) = float(self.values.mean()), self.error()
        half = t_quantile(freedom, family) * error
        return {"mean": mean, "low": mean - half, "high": mean + half}

    def cell(self, scale: float = 1.0, digits: int = 2) -> str:
        """Mean and interval for a table."""
        return interval_cell(as_interval(self.interval()), scale, digits)

    def difference(self, family: int) -> str:
        """The same of a difference: a star where it excludes 0, two where those of a family do."""
        own, together = self.interval(), self.interval(family)
        stars = sum(not found["low"] <= 0 <= found["high"] for found in (own, together))
        return interval_cell(as_interval(own), 1, 2, sign="+") + r"\*" * stars

    def detectable(self) -> str:
        """The true difference that is found with 80% power, for a table."""
        error, freedom = self.error()
        return f"{detectable(error, freedom):.2f}" if error else NOT_MEASURED


def as_interval(values: dict[str, float]) -> Interval:
    """The values of `interval` for a table."""
    return Interval(values["mean"], values["low"], values["high"])


# ---- the records ---------------------------------------------------------------------------------


def folders(parts: Sequence[str]) -> list[Path]:
    """The folders of the recorded seeds."""
    return [folder for part in parts for folder in sorted((studies.RECORDS / part).glob("seed_*"))]


# ---- reward models -------------------------------------------------------------------------------


@cache
def scores(parts: Sequence[str], rows: str) -> dict[str, Values]:
    """Scores (S, R, 2) of the reward models and, with S = 1, of what needs no training."""
    seeds = [read_scores(folder / EVALUATIONS[rows] / "scores.jsonl") for folder in folders(parts)]
    used = [pair["row"] for pair in seeds[0].pairs]
    baselines = studies.read("film-baselines/scores.json")[rows]
    found = {name: np.stack([seed.scores[name] for seed in seeds]) for name in NAMES}
    return found | {name: np.array(own)[None, used] for name, own in baselines.items()}


def right(values: Values) -> Crossed:
    """Scores (S, R, 2) as the outcomes (S, R) of the pairs."""
    return Crossed(np.stack([outcomes(seed[:, 0], seed[:, 1]) for seed in values]))


def correlations(values: Values, others: Values) -> list[float]:
    """Of two kinds of scores (S, R, 2) of the same sentences, a number for each seed."""
    pairs = zip(values, np.broadcast_to(others, values.shape), strict=True)
    return [float(np.corrcoef(a.ravel(), b.ravel())[0, 1]) for a, b in pairs]


def reward_models(parts: Sequence[str] = SEEDS) -> str:
    """A line for each reward model and baseline."""
    votes, means = scores(parts, "votes"), scores(parts, "means")
    people = means["other people"]
    rows = [
        [
            NAMES.get(name, name),
            right(votes[name]).cell(100, 1),
            right(means[name]).cell(100, 1) if name != "other people" else NOT_MEASURED,
            over(correlations(means[name], people)) if name != "other people" else NOT_MEASURED,
        ]
        for name in means
    ]
    heads = ["scores by", "single votes, %", "order of mean ratings, %", "correlation with them"]
    return markdown.table(heads, rows)


def growth(parts: Sequence[str] = SEEDS) -> str:
    """What twice the votes add; the proxy next to the ridge and to gold."""
    doublings = np.log2(list(VOTES.values()))
    far = doublings - doublings.mean()
    votes, means = scores(parts, "votes"), scores(parts, "means")
    by_size = np.stack([right(votes[name]).values for name in VOTES])  # (4, S, R)
    slope = Crossed(np.tensordot(far / (far @ far), by_size, 1))
    above = [
        Crossed(right(found["reward"]).values - right(found["ridge"]).values).cell(100, 1)
        for found in (votes, means)
    ]
    alike = Crossed((right(means["reward"]).values == right(means[GOLD]).values).astype(float))
    return (
        f"Twice the votes add {slope.cell(100, 1)} points on single votes. The proxy is {above[0]} "
        f"points above the ridge there, and {above[1]} on mean ratings. Proxy and gold order "
        f"{alike.cell(100, 1)}% of the pairs by mean rating alike; over the sentences their scores "
        f"have a correlation of {over(correlations(means['reward'], means[GOLD]))}."
    )


# ---- policies ------------------------------------------------------------------------------------


@cache
def measured(folder: Path) -> dict[str, dict[float, Recorded]]:
    """The measured policies of a seed, by method and setting; `pool` are those of SFT."""
    found: dict[str, dict[float, Recorded]] = {}
    for file in folder.glob("frontier/seed_*/measured/*/*.json"):
        record = Recorded.of(json.loads(file.read_text()))
        found.setdefault(file.parent.name, {})[float(file.stem)] = record
    return {  # from the nearest setting to the farthest
        method: dict(sorted(found[method].items(), reverse=method == "dpo"))
        for method in sorted(found)
    }


def seed_points(folder: Path, with_penalty: bool = False) -> SeedPoints:
    """What the figure is made of; `with_penalty`, not stopping costs the gold reward as well."""
    policies = {
        method: {setting: penalised(own) if with_penalty else own for setting, own in found.items()}
        for method, found in measured(folder).items()
    }
    (pool,) = policies.pop("pool").values()
    return SeedPoints(int(folder.name.removeprefix("seed_")), pool, policies)


def penalised(policy: Measured) -> Measured:
    """The policy with the proxy's penalty in the gold rewards too."""
    return replace(policy, gold=np.where(policy.proxy == PENALTY, PENALTY, policy.gold))


@cache
def tracks(folder: Path, with_penalty: bool) -> Mapping[str, Sequence[Point]]:
    """The points of each method."""
    return tracks_of(seed_points(folder, with_penalty), SIZES)


def gain_at(track: Sequence[Point], kl: float) -> Values | None:
    """The gold gain (P,) of a method at a KL, linear in its root between points; None beyond them.

    The first point is the SFT policy, with a KL and a gain of 0.
    """
    near, near_gain = 0.0, np.zeros_like(track[0]["gold_gain"])
    for point in sorted(track, key=lambda point: point["kl"].mean()):
        far, gain = distance(point["kl"].mean()), point["gold_gain"]
        if near < sqrt(kl) <= far:
            share = (sqrt(kl) - near) / (far - near)
            return np.asarray((1 - share) * near_gain + share * gain)
        near, near_gain = far, gain
    return None


@cache
def gains(
    parts: Sequence[str], method: str, kl: float, with_penalty: bool = False
) -> Crossed | None:
    """Gold gains (S, P) of a method at a KL: the mean over tracks that reach it on all seeds."""
    seeds = [tracks(folder, with_penalty) for folder in folders(parts)]
    names = [name for name in seeds[0] if METHODS[method].fullmatch(name)]
    by_track = [[gain_at(seed[name], kl) for seed in seeds] for name in names]
    reached = [np.array(own, float) for own in by_track if not any(v is None for v in own)]
    return Crossed(np.mean(reached, axis=0)) if reached else None


def by_kl(title: str, rows: Mapping[str, Sequence[str]]) -> str:
    """A table with columns for each KL that something reaches: values, and detectable ones."""
    heads = [f"{text}KL {kl:g}" for text in ("", f"{HEADERS[0]}, ") for kl in KLS]
    columns = enumerate(zip(*rows.values(), strict=True))
    reached = [i for i, cells in columns if set(cells) != {NOT_MEASURED}]
    lines = [[name, *(row[i] for i in reached)] for name, row in rows.items()]
    return markdown.table([title, *(heads[i] for i in reached)], lines)


def at_kls(parts: Sequence[str] = SEEDS) -> str:
    """The gold gain of each method at each KL."""
    found = {method: [gains(parts, method, kl) for kl in KLS] for method in METHODS}
    rows = {
        method: [own.cell() if own else NOT_MEASURED for own in gained]
        for method, gained in found.items()
    }
    return by_kl("gold gain over SFT", rows)


def differences(parts: Sequence[str] = SEEDS, with_penalty: bool = False) -> str:
    """Differences of methods at the same KL, the same seed and prompt."""
    found: dict[tuple[str, str], list[Crossed | None]] = {}
    for pair in COMPARED:
        sides = [[gains(parts, method, kl, with_penalty) for kl in KLS] for method in pair]
        found[pair] = [
            Crossed(own.values - other.values) if own and other else None
            for own, other in zip(*sides, strict=True)
        ]
    family = sum(own is not None for row in found.values() for own in row)
    rows = {
        " - ".join(pair): [own.difference(family) if own else NOT_MEASURED for own in row]
        + [own.detectable() if own else NOT_MEASURED for own in row]
        for pair, row in found.items()
    }
    return by_kl("difference", rows)


def unfinished(parts: Sequence[str] = SEEDS) -> str:
    """How gold judges completions that did not stop, whose proxy reward is the penalty."""
    lines = []
    for folder in folders(parts):
        policies = [p for own in measured(folder).values() for p in own.values()]
        is_cut = np.concatenate([policy.proxy.ravel() == PENALTY for policy in policies])
        gold = np.concatenate([policy.gold.ravel() for policy in policies])
        share, mean = 100 * is_cut.mean(), round(gold[is_cut].mean(), 2) + 0.0  # not -0.00
        lines.append(f"{folder.name.replace('_', ' ')}: {share:.0f}% of completions, {mean:.2f}")
    return f"Not stopped, and the mean gold reward of these: {'; '.join(lines)}."


# ---- texts ---------------------------------------------------------------------------------------


def farthest(folder: Path) -> dict[str, tuple[Recorded, list[int]]]:
    """The farthest policy of each method, and which completion of each prompt is looked at."""
    policies = measured(folder)
    (pool,) = policies["pool"].values()
    first = [0] * len(pool.gold)
    found = {"SFT": (pool, first), "best of 64": (pool, pool.proxy.argmax(1).tolist())}
    for method, settings in policies.items():
        if method != "pool":
            setting, policy = list(settings.items())[-1]
            found[policy_name(method, setting)] = (policy, first)
    return found


def policy_name(method: str, setting: float) -> str:
    """Of a measured policy, for a reader."""
    if method == "rejection":
        return f"SFT on the best of {setting:g}"
    name = re.sub(r" num_candidates=(\d+)", r", \1 candidates", report.title(method))
    name = name.replace(" over beta", "").replace("=", " ")
    return f"{name}, {report.setting(method)} {setting:g}"


def texts(parts: Sequence[str] = SEEDS) -> str:
    """What the farthest policies write: one completion of each prompt."""
    heads = ["policy", "KL", "gold", "tokens", "stopped, %"]
    heads += ["distinct words, %", "pairs, %", "log-prob per token"]
    rows: dict[str, list[list[float]]] = {}
    for folder in folders(parts):
        for name, (policy, chosen) in farthest(folder).items():
            at = (np.arange(len(chosen)), chosen)
            is_best = name == "best of 64"
            kl = float("nan") if is_best else float(policy.log_ratio.mean())
            values = [kl, *(float(v[at].mean()) for v in (policy.gold, policy.lengths))]
            values.append(100 * float((policy.proxy[at] != PENALTY).mean()))
            values += [100 * share for share in policy.distinct["best" if is_best else "first"]]
            rows.setdefault(name, []).append([*values, float(policy.fluency[at].mean())])
    digits = (2, 2, 1, 0, 0, 0, 2)
    cells = [
        [name, *(f"{value:.{n}f}" for value, n in zip(np.mean(own, 0), digits, strict=True))]
        for name, own in rows.items()
    ]
    return markdown.table(heads, [[c.replace("nan", NOT_MEASURED) for c in row] for row in cells])


def samples(parts: Sequence[str] = SEEDS, number: int = 6) -> str:
    """Completions of the first test prompts by the farthest policies of the first seed."""
    folder = folders(parts)[0]
    rows = [
        [policy.prompts[i] if name == "SFT" else "", name, policy.texts[i][chosen[i]].strip()]
        for i in range(number)
        for name, (policy, chosen) in farthest(folder).items()
    ]
    return markdown.table(["prompt", "policy", "completion"], rows)


def draw() -> Path:
    """Gold reward over KL, and over the proxy's: dots are seeds, lines their means."""
    results: dict[str, Any] = summarise([seed_points(own) for own in folders(SEEDS)], SIZES)
    with style():
        figure = titled_figure("", 5, 8)
        over_kl, over_proxy = figure.subplots(2, 1)
        start = np.mean([seed["gold"]["mean"] for seed in results["seeds"]])
        for name, axes in (("kl", over_kl), ("proxy", over_proxy)):
            for (method, pattern), colour in zip(METHODS.items(), COLOURS, strict=False):
                for track in filter(pattern.fullmatch, report.methods_of(results)):
                    draw_track(axes, results, track, name, color=colour, label=method)
            axes.axhline(start, color=GREY, linestyle="--", linewidth=1, label="SFT")
            axes.set_ylabel("gold reward")
        over_kl.set(title="Gold reward over KL", xlabel="KL to SFT, nats per completion")
        over_kl.set(xscale="log", xticks=TICKS, xticklabels=TICKS)
        over_kl.minorticks_off()
        look: dict[str, Any] = {"color": GREY, "linestyle": "", "markersize": 5}
        betas = [
            over_kl.plot([], [], mark, label=beta, **look)[0] for beta, mark in MARKERS.items()
        ]
        over_kl.legend(handles=betas, title="GRPO's beta", loc="lower right", frameon=True)
        over_proxy.set(title="Gold over proxy reward", xlabel="proxy reward")
        lines = {line.get_label(): line for line in over_proxy.get_lines()}
        lines = {name: line for name, line in lines.items() if not name.startswith("_")}
        legend = over_proxy.legend(lines.values(), lines, loc="lower right", frameon=True)
        for handle in legend.get_lines():
            handle.set_marker("")  # of GRPO that is by beta
        return save(figure, studies.ROOT / "assets" / "film.png", DPI)


def draw_track(axes: Any, results: dict[str, Any], track: str, name: str, **look: Any) -> None:
    """The policies of a method over `kl` or the `proxy` reward; of GRPO with its beta's mark."""
    kl, over, gold = (report.series_of(results, track, of) for of in ("kl", name, "gold"))  # (S, K)
    far = kl.mean(0) > report.NEAREST  # without best of 1
    over, gold = over[:, far], gold[:, far]
    axes.plot(over.ravel(), gold.ravel(), ".", color=look["color"], alpha=0.4, markersize=5)
    beta = re.search(r"beta=([\d.]+)", track)
    marker = MARKERS[beta[1]] if beta else "o"
    axes.plot(over.mean(0), gold.mean(0), marker=marker, markersize=5, linewidth=2, **look)


def shown() -> str:
    """The figure."""
    return "![Gold reward over KL and over the proxy reward](../assets/film.png)"


TABLES: dict[str, Callable[[], str]] = {
    "film-1.reward_models": reward_models,
    "film-1.growth": growth,
    "film-1.shown": shown,
    "film-1.at_kls": at_kls,
    "film-1.differences": differences,
    "film-1.unfinished": unfinished,
    "film-1.differences_with_penalty": partial(differences, with_penalty=True),
    "film-1.texts": texts,
    "film-1.samples": samples,
    "film-0.at_kls": partial(at_kls, SEEDS[:1]),
    "film-bf16.reward_models": partial(reward_models, BFLOAT16),
    "film-bf16.at_kls": partial(at_kls, BFLOAT16),
}
FIGURES = {"film-1": draw}
