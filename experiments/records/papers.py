"""Published claims beside the records: what each says, the effect here, and whether it holds.

    python -m experiments.records.papers

A claim says which sign an effect has. It holds where the 95% interval over seeds lies on that side
of 0, does not where it lies on the other; else it cannot be told, and the interval's end on that
side is the most that the claim may amount to. No claim is corrected for the number of the others. A
record that lacks a run leaves its claims unmeasured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.outcomes import over_seeds
from experiments.overoptimization import curves
from experiments.records import make

Record = Mapping[str, Any]
Effect = Callable[[Record], list[float]]  # by seed; a KeyError where it was not measured
BASE = ("", "")  # detail and choice of the base chain
HEADERS = ["claim", "setting here", "effect [95%]", "here"]


@dataclass(frozen=True)
class Claim:
    """What a paper says of the sign of an effect."""

    paper: str
    says: str
    setting: str
    unit: str
    sign: int  # that the paper says the effect has, 1 or -1
    file: str  # of the record, in `assets/results`
    effect: Effect

    def row(self, record: Record) -> list[str]:
        """Its line of the table."""
        told = [f"{self.says} ({self.paper})", self.setting]
        try:
            found = over_seeds(self.effect(record))
        except KeyError:
            return [*told, NOT_MEASURED, "not measured"]
        cell = f"{found.difference.removesuffix(' *')} {self.unit}, {found.n} seeds"
        if found.low is None or found.high is None:
            return [*told, cell, "cannot be told: one seed"]
        if found.excludes_zero:
            return [*told, cell, "holds" if found.mean * self.sign > 0 else "does not hold"]
        most = found.high if self.sign > 0 else found.low
        return [*told, cell, f"cannot be told; at most {most:+.2f}"]


def table() -> str:
    """All claims, with what the records say of them."""
    records = {file: make.read(file) for file in {claim.file for claim in CLAIMS}}
    return markdown.table(HEADERS, [claim.row(records[claim.file]) for claim in CLAIMS])


# ---- effects of a sweep --------------------------------------------------------------------------


def line(
    stage: str,
    outcome: str,
    of: tuple[str, str],
    beside: tuple[str, str] = BASE,
    scale: float = 1.0,
) -> Effect:
    """What one line of a stage has over another, or over the base of the same seed."""

    def effect(record: Record) -> list[float]:
        own = [e for e in record["effects"] if (e["stage"], e["outcome"]) == (stage, outcome)]
        runs = {(e["detail"], e["choice"]): e["by_seed"] for e in own}
        if own:
            runs[BASE] = own[0]["base_by_seed"]
        return [scale * (a - b) for a, b in zip(runs[of], runs[beside], strict=True)]

    return effect


# ---- effects of the over-optimisation record -----------------------------------------------------


def by_seed(record: Record, key: str, method: str) -> list[list[Record]]:
    """The points or turns of a method, seed by seed."""
    found: dict[int, list[Record]] = {}
    for one in record[key]:
        if one["method"] == method:
            found.setdefault(one["seed"], []).append(one)
    if not found:
        raise KeyError(method)
    return [found[seed] for seed in sorted(found)]


def turn(method: str) -> Effect:
    """Gold reward of a method's last setting minus that of its best one, in points.

    The best is that of the other seeds' mean: a seed's own best would be above its last by chance.
    """

    def effect(record: Record) -> list[float]:
        gains = np.array(
            [
                [100 * point["gold_gain"]["mean"] for point in points]
                for points in by_seed(record, "points", method)
            ]
        )  # S seeds, settings from the first to the last
        best = [np.delete(gains, seed, axis=0).mean(0).argmax() for seed in range(len(gains))]
        return [float(own[-1] - own[at]) for own, at in zip(gains, best, strict=True)]

    return effect


def far(method: str) -> Effect:
    """Gold reward of a method at its farthest from the reference minus that at its nearest."""

    def of_seed(points: Sequence[Record]) -> float:
        nearest, *_, farthest = sorted(points, key=lambda point: point["kl"]["mean"])
        return 100 * (farthest["gold_gain"]["mean"] - nearest["gold_gain"]["mean"])

    return lambda record: [of_seed(points) for points in by_seed(record, "points", method)]


def at_equal_kl(method: str, other: str, gain: str = "gold_gain", scale: float = 100) -> Effect:
    """A reward of a method over another at its points' KL, mean over its settings.

    The other's gain is interpolated between its own points and the reference. A setting that on any
    seed is farther from the reference than the other has been is left out on all of them.
    """

    def effect(record: Record) -> list[float]:
        gains: dict[float, list[float]] = {}
        both = (by_seed(record, "points", name) for name in (method, other))
        seeds = list(zip(*both, strict=True))
        for own, others in seeds:
            path = sorted((one["kl"]["mean"], one[gain]["mean"]) for one in others)
            kl, reward = (np.array([0.0, *ends]) for ends in zip(*path, strict=True))
            for one in own:
                if 0 < one["kl"]["mean"] <= kl[-1]:
                    more = one[gain]["mean"] - np.interp(one["kl"]["mean"], kl, reward)
                    gains.setdefault(one["setting"], []).append(scale * float(more))
        common = [own for own in gains.values() if len(own) == len(seeds)]
        if not common:
            raise KeyError(f"no {method} within the reach of {other}")
        return [float(np.mean(own)) for own in zip(*common, strict=True)]

    return effect


def misfit(method: str, form: str, other: str) -> Effect:
    """How much farther a method's gold rewards are from the other form of Gao's, rmse in points."""

    def of_seed(points: Sequence[Record]) -> float:
        distances, gains = (
            np.array(values)
            for values in zip(
                *((p["distance"], p["gold_gain"]["mean"]) for p in points), strict=True
            )
        )
        ours, theirs = (curves.fit(name, distances, gains).rmse for name in (form, other))
        return 100 * (theirs - ours)

    return lambda record: [of_seed(points) for points in by_seed(record, "points", method)]


# ---- the claims ----------------------------------------------------------------------------------

SWEEP, OVER = "ablations/sweep.json", "overoptimization/results.json"
GOLD, POINTS, ACCURACY = "gold_reward", "points of gold reward", "points of accuracy"
GAO, DPO = "Gao et al. 2022, arXiv 2210.10760", "Rafailov et al. 2023, arXiv 2305.18290, fig. 2"
DAA = "Rafailov et al. 2024, arXiv 2406.02900"
HUANG, STIENNON = "Huang et al. 2024, arXiv 2403.17031", "Stiennon et al. 2020, arXiv 2009.01325"
DR_GRPO, DAPO = "Liu et al. 2025, arXiv 2503.20783", "Yu et al. 2025, arXiv 2503.14476"
GSPO, PODS = "Zheng et al. 2025, arXiv 2507.18071", "Xu et al. 2025, arXiv 2504.13818"
CLIP, RATIO = ("clipping", "0.2 and 0.28, DAPO"), ("ratio", "of the sequence, GSPO")
DRAWN, CONSTANT = ("rejection", "none, 8 of 8"), ("aggregation", "constant, Dr. GRPO")
# fmt: off
CLAIMS = [
    Claim(DPO, "at the same KL DPO has more reward than PPO",
          "DPO at the betas that no seed takes farther than GRPO (beta 1) beside GRPO, one proxy",
          POINTS, 1, OVER, at_equal_kl("dpo", "grpo")),
    Claim(DAA, "DPO too is over-optimised: far from the reference it gets worse",
          "DPO, smallest beta minus best of the other seeds", POINTS, -1, OVER, turn("dpo")),
    Claim(DAA, "the same", "DPO over beta, farthest minus nearest", POINTS, -1, OVER, far("dpo")),
    Claim(DAA, "with too small a beta DPO gets worse",
          "beta 0.02 beside 0.2", POINTS, -1, SWEEP, line("dpo", GOLD, ("beta", "0.02"))),
    Claim(GAO, "against a proxy RL loses true reward in the end",
          "GRPO, last step minus best of the other seeds", POINTS, -1, OVER, turn("grpo")),
    Claim(GAO, "so does best of n",
          "last n minus best of the other seeds", POINTS, -1, OVER, turn("best_of_n")),
    Claim(GAO, "RL needs more KL than best of n for as much of the optimised reward",
          "best of n, at the upper bound of its KL, beside GRPO",
          "units of the proxy", 1, OVER, at_equal_kl("best_of_n", "grpo", "proxy_gain", 1)),
    Claim(GAO, "best of n is nearer to d (a - b d) than to RL's form",
          "how much farther off d (a - b log d) is, rmse; d by the bound",
          POINTS, 1, OVER, misfit("best_of_n", "bon", "rl")),
    Claim(GAO, "RL is nearer to d (a - b log d) than to best of n's form",
          "GRPO: how much farther off d (a - b d) is, rmse",
          POINTS, 1, OVER, misfit("grpo", "rl", "bon")),
    Claim(STIENNON, "a reward head of variance 1/(d + 1) is worth having",
          "reward model with standard deviation 0.02 instead",
          ACCURACY, -1, SWEEP, line("reward", "accuracy", ("head", "std 0.02, transformers"))),
    Claim(HUANG, "dropout is better off",
          "reward model with dropout 0.1 instead",
          ACCURACY, -1, SWEEP, line("reward", "accuracy", ("dropout", "0.1, padded"))),
    Claim(HUANG, "an Adam epsilon of 1e-5 is worth having",
          "reward model, 1e-5 beside 1e-8",
          ACCURACY, 1, SWEEP, line("reward", "accuracy", ("Adam eps", "1e-5"))),
    Claim(DR_GRPO, "the mean over a completion's tokens makes wrong completions longer",
          "all completions, with a sum over a constant instead",
          "tokens", -1, SWEEP, line("grpo", "length", CONSTANT)),
    Claim(DAPO, "a higher upper bound keeps up entropy",
          "four passes over a rollout, 0.28 beside 0.2",
          "nats per 1,000 tokens", 1, SWEEP, line("updates", "entropy", CLIP, scale=1000)),
    Claim(DAPO, "and reaches more",
          "the same runs", POINTS, 1, SWEEP, line("updates", GOLD, CLIP)),
    Claim(GSPO, "with the sequence's ratio as many updates learn more",
          "four passes over a rollout, bounds 3e-4 and 4e-4 beside 0.2",
          "units of the optimised reward", 1, SWEEP, line("updates", "reward", RATIO)),
    Claim(PODS, "the most different of many rollouts teach more than as many drawn",
          "8 of 12 by max_variance beside 8 of 8; sampling costs half more",
          POINTS, 1, SWEEP, line("grpo", GOLD, ("rejection", "max_variance"), DRAWN)),
    Claim("the origin's README", "normalising what is kept once more helps",
          "over all ranks, beside once",
          POINTS, 1, SWEEP, line("grpo", GOLD, ("global normalisation", "on"))),
]
# fmt: on


if __name__ == "__main__":
    print(table())
