"""What follows from measured policies: points over the distance, fitted curves, who turned.

Pure functions of the judges' values; every interval is of 95%. S seeds, K points of a method, P
held-out prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from common.evaluation.intervals import PreferenceAccuracy, mean_interval
from experiments.overoptimization import curves
from experiments.overoptimization.curves import Values, best_of_n, best_of_n_kl
from experiments.overoptimization.measuring import Measured

BEST_OF_N = "best_of_n"
FORM_OF = {BEST_OF_N: "bon", "rejection": "rl", "dpo": "rl", "grpo": "rl"}  # methods in their order


@dataclass
class SeedPoints:
    """What was measured of a seed's chain."""

    seed: int  # of all its runs
    proxy_accuracy: PreferenceAccuracy  # on held-out pairs
    pool: Measured  # completions of the SFT policy
    policies: Mapping[str, Mapping[float, Measured]]  # by method, then by its n, beta or step


@dataclass
class Point:
    """A policy: means over the completions of each prompt, (P,), and gains over the pool."""

    setting: float
    kl: Values
    gold: Values
    proxy: Values
    gold_gain: Values
    proxy_gain: Values
    length: float | None = None  # None of best of n, which is never run
    stop_rate: float | None = None


def summarise(seeds: Sequence[SeedPoints], sizes: Sequence[int]) -> dict[str, Any]:
    """Everything that is reported, ready for JSON: of seeds with the same settings, and sizes n."""
    tracks = {own.seed: tracks_of(own, sizes) for own in seeds}
    methods = [method for method in FORM_OF if tracks[seeds[0].seed].get(method)]
    every = [(method, seed, own[method]) for method in methods for seed, own in tracks.items()]
    return {
        "seeds": [start_of(own) for own in seeds],
        "points": [point_of(method, seed, p) for method, seed, track in every for p in track],
        "fits": [fit_of(m, [own[m] for own in tracks.values()]) for m in methods],
        "turns": [turn_of(*track) for track in every],
    }


def tracks_of(own: SeedPoints, sizes: Sequence[int]) -> dict[str, list[Point]]:
    """A seed's points by method, each in the order of its settings."""
    pool = own.pool

    def point(setting: float, kl: Values, gold: Values, proxy: Values, *rest: float) -> Point:
        gains = (gold - pool.gold.mean(1), proxy - pool.proxy.mean(1))
        return Point(setting, kl, gold, proxy, *gains, *rest)

    gold, proxy = (best_of_n(pool.proxy, values, sizes) for values in (pool.gold, pool.proxy))
    kl = [np.full(len(pool.gold), best_of_n_kl(size)) for size in sizes]
    tracks = {BEST_OF_N: list(map(point, sizes, kl, gold, proxy))}
    for method, policies in own.policies.items():
        tracks[method] = [
            point(n, m.log_ratio.mean(1), m.gold.mean(1), m.proxy.mean(1), m.length, m.stop_rate)
            for n, m in policies.items()
        ]
    return tracks


def start_of(own: SeedPoints) -> dict[str, Any]:
    """The SFT policy of a seed and its judges."""
    pool = own.pool
    # Of the judges over a prompt's completions, all prompts together
    gold, proxy = (v - v.mean(1, keepdims=True) for v in (pool.gold, pool.proxy))
    scale = math.sqrt((gold**2).sum() * (proxy**2).sum())
    return {
        "seed": own.seed,
        "num_prompts": len(pool.gold),
        "gold": interval(pool.gold.mean(1)),
        "gold_std": float(pool.gold.std()),
        "proxy": interval(pool.proxy.mean(1)),
        "proxy_std": float(pool.proxy.std()),
        "judges_correlation": float((gold * proxy).sum() / scale) if scale > 0 else None,
        "proxy_accuracy": asdict(own.proxy_accuracy),
    }


def point_of(method: str, seed: int, point: Point) -> dict[str, Any]:
    """A method's point of a seed, with intervals over the prompts."""
    values = {
        name: interval(value) if isinstance(value, np.ndarray) else value
        for name, value in vars(point).items()
    }
    return {"method": method, "seed": seed, "distance": distance(point), **values}


def fit_of(method: str, tracks: Sequence[Sequence[Point]]) -> dict[str, Any]:
    """A method's curve over all seeds: the form that is meant for it, and how well each fits."""
    kl, gains = (
        np.array([[getattr(point, name) for point in track] for track in tracks])
        for name in ("kl", "gold_gain")
    )  # (S, K, P)
    form, distances = FORM_OF[method], curves.distance(kl.mean(-1))
    fitted: dict[str, Any] = {  # None where it is infinite
        name: {end: v if math.isfinite(v) else None for end, v in found.items()}
        for name, found in curves.fit_intervals(form, kl, gains).items()
    }
    if fitted["peak"]["value"] is None:
        fitted["peak"] = None
    rmse = {other: curves.fit(other, distances, gains.mean(-1)).rmse for other in curves.FORMS}
    return {
        "method": method,
        "form": form,
        "num_points": int(distances.size),
        "longest_distance": float(distances.max()),
        **fitted,
        "rmse_of_forms": rmse,
    }


def turn_of(method: str, seed: int, track: Sequence[Point]) -> dict[str, Any]:
    """Whether gold had its best before the farthest point, and what the proxy did from there on.

    A method has turned if the interval of the drop in gold lies below 0, and has been
    over-optimised if the proxy did not fall with it.
    """
    peak, change = curves.drop(np.stack([point.gold_gain for point in track]))
    best, last = track[peak], track[-1]
    gold_change = interval(change)
    proxy_change = interval((last.proxy_gain - best.proxy_gain)[1::2])  # of the same prompts
    return {
        "method": method,
        "seed": seed,
        "peak": best.setting,
        "last": last.setting,
        "peak_distance": distance(best),
        "last_distance": distance(last),
        "gold_change": gold_change,
        "proxy_change": proxy_change,
        "turned": gold_change["high"] < 0,
        "proxy_rose": proxy_change["low"] > 0,
    }


def distance(point: Point) -> float:
    """From the SFT policy, sqrt(nats)."""
    return float(curves.distance(point.kl.mean()))


def interval(values: Values) -> dict[str, float]:
    """Mean over prompts (P,) with its bootstrap interval, ready for JSON."""
    return dict(zip(("mean", "low", "high"), mean_interval(values), strict=True))
