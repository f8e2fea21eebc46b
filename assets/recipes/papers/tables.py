"""Published claims compared with the records: the claim, the effect here, and whether it holds.

A claim has the sign of an effect. It holds where the 95% interval over seeds lies on that side of
0, and does not where it lies on the other. Else the effect is not significant, and the interval's
end on that side is its largest size. No claim is corrected for the number of the others. A
record that lacks a run leaves its claims unmeasured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.evidence.records import studies, sweeps
from experiments.runs.outcomes import over_seeds
from experiments.runs.overoptimization.curves import fit
from experiments.runs.overoptimization.report import series_of

Record = Mapping[str, Any]
Effect = Callable[[Record], list[float]]  # by seed; a KeyError where it was not measured
BASE = ("", "")  # detail and choice of the base chain
HEADERS = ["claim", "setting here", "effect [95%]", "here"]


@dataclass(frozen=True)
class Claim:
    """A paper's claim about the sign of an effect."""

    paper: str
    says: str
    setting: str
    unit: str
    sign: int  # that the paper says the effect has, 1 or -1
    file: str  # of the record, in `assets/results`
    effect: Effect

    def row(self, record: Record) -> list[str]:
        """Its line of the table."""
        cells = [f"{self.says} ({self.paper})", self.setting]
        try:
            mean = over_seeds(self.effect(record))
        except KeyError:
            return [*cells, NOT_MEASURED, "not measured"]
        cell = f"{mean.difference.removesuffix(' *')} {self.unit}, {mean.n} seeds"
        if mean.low is None or mean.high is None:
            return [*cells, cell, "not significant: one seed"]
        if mean.excludes_zero:
            return [*cells, cell, "holds" if mean.mean * self.sign > 0 else "does not hold"]
        end = mean.high if self.sign > 0 else mean.low
        return [*cells, cell, f"not significant; at most {end:+.2f}"]


def table() -> str:
    """All claims, each with its effect in the records."""
    records = {file: studies.read(file) for file in {claim.file for claim in CLAIMS}}
    return markdown.table(HEADERS, [claim.row(records[claim.file]) for claim in CLAIMS])


# ---- effects of a sweep --------------------------------------------------------------------------


def line(
    stage: str,
    outcome: str,
    of: tuple[str, str],
    record: Record,
    baseline: tuple[str, str] = BASE,
    scale: float = 1.0,
) -> list[float]:
    """One line of a stage minus another, or minus the base of the same seed."""
    every = sweeps.effects(record)
    effects = [e for e in every if (e.variant.stage, e.outcome) == (stage, outcome)]
    runs = {(e.variant.detail, e.variant.choice): e.values for e in effects}
    if effects:
        runs[BASE] = effects[0].base
    return [scale * (a - b) for a, b in zip(runs[of], runs[baseline], strict=True)]


# ---- effects of the over-optimisation record: arrays of S seeds and K settings -------------------


def turn(method: str, record: Record) -> list[float]:
    """Gold reward of a method's last setting minus that of its best one, in points.

    The best is that of the other seeds' mean: a seed's best would be above its last by chance.
    """
    gains = 100 * series_of(record, method, "gold_gain")  # (S, K)
    best = [np.delete(gains, seed, axis=0).mean(0).argmax() for seed in range(len(gains))]
    return [float(own[-1] - own[at]) for own, at in zip(gains, best, strict=True)]


def far(method: str, record: Record) -> list[float]:
    """Gold reward of a method at its farthest from the reference minus that at its nearest."""
    kl, gains = (series_of(record, method, name) for name in ("kl", "gold_gain"))  # (S, K)
    return [
        100 * float(own[at.argmax()] - own[at.argmin()]) for own, at in zip(gains, kl, strict=True)
    ]


def at_equal_kl(
    method: str, other: str, record: Record, gain: str = "gold_gain", scale: float = 100
) -> list[float]:
    """A reward of a method over another at its points' KL, mean over its settings.

    The other's gain is interpolated between its points and the reference. A setting that on any
    seed is farther from the reference than the other has been is left out on all of them.
    """
    kl, gains = (series_of(record, method, name) for name in ("kl", gain))  # (S, K)
    kls, others = (series_of(record, other, name) for name in ("kl", gain))  # (S, L)
    common = ((kl > 0) & (kl <= kls.max(1, keepdims=True))).all(0)  # (K,)
    if not common.any():
        raise KeyError(f"no {method} within the reach of {other}")
    found = []
    for seed, order in enumerate(kls.argsort(1)):
        at, reward = (np.array([0.0, *own[seed, order]]) for own in (kls, others))
        more = gains[seed] - np.interp(kl[seed], at, reward)
        found.append(scale * float(more[common].mean()))
    return found


def misfit(method: str, form: str, other: str, record: Record) -> list[float]:
    """How much worse the other form of Gao's fits a method's gold rewards, rmse in points."""
    distances, gains = (series_of(record, method, name) for name in ("distance", "gold_gain"))
    return [
        100 * (fit(other, *points).rmse - fit(form, *points).rmse)
        for points in zip(distances, gains, strict=True)
    ]


# ---- the claims ----------------------------------------------------------------------------------

SWEEP, OVER = "ablations/sweep.json", "overoptimization/results.json"
GOLD, POINTS, ACCURACY = "gold_reward", "points of gold reward", "points of accuracy"
GAO, DPO, DAA = "Gao 2022", "Rafailov 2023, fig. 2", "Rafailov 2024"
STIENNON, HUANG, DR_GRPO = "Stiennon 2020", "Huang 2024", "Liu 2025"
DAPO, GSPO, PODS = "Yu 2025", "Zheng 2025", "Xu 2025"
CLIP, RATIO = ("clipping", "0.2 and 0.28, DAPO"), ("ratio", "of the sequence, GSPO")
DRAWN, CONSTANT = ("rejection", "none, 8 of 8"), ("aggregation", "constant, Dr. GRPO")
# fmt: off
CLAIMS = [
    Claim(DPO, "at equal KL, DPO has more reward than PPO",
          "DPO at the betas within GRPO's KL on every seed (beta 1), minus GRPO",
          POINTS, 1, OVER, partial(at_equal_kl, "dpo", "grpo")),
    Claim(DAA, "DPO gets worse far from the reference",
          "DPO, smallest beta minus best of the other seeds",
          POINTS, -1, OVER, partial(turn, "dpo")),
    Claim(DAA, "the same", "DPO, largest KL minus smallest", POINTS, -1, OVER, partial(far, "dpo")),
    Claim(DAA, "DPO gets worse if beta is too small",
          "beta 0.02 minus 0.2", POINTS, -1, SWEEP, partial(line, "dpo", GOLD, ("beta", "0.02"))),
    Claim(GAO, "RL against a proxy loses true reward in the end",
          "GRPO, last step minus best of the other seeds", POINTS, -1, OVER, partial(turn, "grpo")),
    Claim(GAO, "so does best of n",
          "largest n minus best of the other seeds", POINTS, -1, OVER, partial(turn, "best_of_n")),
    Claim(GAO, "RL needs more KL than best of n for the same proxy reward",
          "best of n at the upper bound of its KL, minus GRPO",
          "units of the proxy", 1, OVER,
          partial(at_equal_kl, "best_of_n", "grpo", gain="proxy_gain", scale=1)),
    Claim(GAO, "d (a - b d) fits best of n better than RL's form",
          "rmse of d (a - b log d) minus rmse of d (a - b d)",
          POINTS, 1, OVER, partial(misfit, "best_of_n", "bon", "rl")),
    Claim(GAO, "d (a - b log d) fits RL better than best of n's form",
          "GRPO, rmse of d (a - b d) minus rmse of d (a - b log d)",
          POINTS, 1, OVER, partial(misfit, "grpo", "rl", "bon")),
    Claim(STIENNON, "a reward head of variance 1/(d + 1) helps",
          "standard deviation 0.02 minus that", ACCURACY, -1, SWEEP,
          partial(line, "reward", "accuracy", ("head", "std 0.02, transformers"))),
    Claim(HUANG, "training without dropout is better",
          "reward model, dropout 0.1 minus none",
          ACCURACY, -1, SWEEP, partial(line, "reward", "accuracy", ("dropout", "0.1, padded"))),
    Claim(HUANG, "an Adam epsilon of 1e-5 helps",
          "reward model, 1e-5 minus 1e-8",
          ACCURACY, 1, SWEEP, partial(line, "reward", "accuracy", ("Adam eps", "1e-5"))),
    Claim(DR_GRPO, "the mean over a completion's tokens makes wrong completions longer",
          "all completions, sum over a constant minus that",
          "tokens", -1, SWEEP, partial(line, "grpo", "length", CONSTANT)),
    Claim(DAPO, "a higher upper clipping bound preserves entropy",
          "four passes over a rollout, bound 0.28 minus 0.2",
          "nats per 1,000 tokens", 1, SWEEP, partial(line, "updates", "entropy", CLIP, scale=1000)),
    Claim(DAPO, "and gains more reward",
          "the same runs", POINTS, 1, SWEEP, partial(line, "updates", GOLD, CLIP)),
    Claim(GSPO, "the sequence's ratio learns more in as many updates",
          "four passes, bounds 3e-4 and 4e-4 minus the token's 0.2",
          "units of the optimised reward", 1, SWEEP, partial(line, "updates", "reward", RATIO)),
    Claim(PODS, "rollouts with the largest variance of reward teach more",
          "8 of 12 by max_variance minus 8 of 8; sampling costs half more", POINTS, 1, SWEEP,
          partial(line, "grpo", GOLD, ("rejection", "max_variance"), baseline=DRAWN)),
    Claim("the origin's README", "normalising the kept advantages again helps",
          "over all ranks, minus once",
          POINTS, 1, SWEEP, partial(line, "grpo", GOLD, ("global normalisation", "on"))),
]
# fmt: on

TABLES: dict[str, Callable[[], str]] = {"ablations.papers": table}
