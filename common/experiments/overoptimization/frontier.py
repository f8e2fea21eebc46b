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
from common.experiments.overoptimization import curves
from common.experiments.overoptimization.curves import Values, best_of_n, best_of_n_kl
from common.experiments.overoptimization.measuring import Measured

BEST_OF_N = "best_of_n"
FORM_OF = {BEST_OF_N: "bon", "rejection": "rl", "dpo": "rl", "grpo": "rl"}  # methods in their order


@dataclass(frozen=True)
class Setting:
    """A policy of a method: by its n, its beta or its step."""

    method: str
    value: float


@dataclass
class SeedPoints:
    """What was measured of a seed's chain."""

    seed: int  # of all its runs
    proxy_accuracy: PreferenceAccuracy | None  # on held-out pairs; None of a proxy that is no model
    pool: Measured  # completions of the SFT policy
    measured: Mapping[Setting, Measured]  # each method's policies in the order of its settings


@dataclass
class Track:
    """A method's points of one seed: kl, gold, proxy and their gains over the pool, (K, P) each."""

    settings: list[float]
    values: dict[str, Values]
    policies: list[Measured | None]  # None of best of n, which is never run


def summarise(seeds: Sequence[SeedPoints], sizes: Sequence[int]) -> dict[str, Any]:
    """Everything that is reported, ready for JSON: of seeds with the same settings, and sizes n."""
    tracks = {s.seed: tracks_of(s, sizes) for s in seeds}
    methods = [method for method in FORM_OF if method in tracks[seeds[0].seed]]
    every = [(method, seed, own[method]) for method in methods for seed, own in tracks.items()]
    return {
        "seeds": [start_of(s) for s in seeds],
        "points": [point for track in every for point in points_of(*track)],
        "fits": [fit_of(m, [own[m] for own in tracks.values()]) for m in methods],
        "turns": [turn_of(*track) for track in every],
    }


def tracks_of(points: SeedPoints, sizes: Sequence[int]) -> dict[str, Track]:
    """A seed's points by method, best of n from the pool first."""
    pool = points.pool

    def track(
        settings: Sequence[float], policies: Any, kl: Values, gold: Values, proxy: Values
    ) -> Track:
        gains = {"gold_gain": gold - pool.gold.mean(1), "proxy_gain": proxy - pool.proxy.mean(1)}
        return Track(list(settings), {"kl": kl, "gold": gold, "proxy": proxy} | gains, policies)

    gold, proxy = (best_of_n(pool.proxy, values, sizes) for values in (pool.gold, pool.proxy))
    kl = np.array([best_of_n_kl(size) for size in sizes])[:, None] * np.ones_like(gold)
    tracks = {BEST_OF_N: track(sizes, [None] * len(sizes), kl, gold, proxy)}
    for method in dict.fromkeys(setting.method for setting in points.measured):
        own = {s.value: m for s, m in points.measured.items() if s.method == method}
        values = (
            np.stack([getattr(m, name).mean(1) for m in own.values()])
            for name in ("log_ratio", "gold", "proxy")
        )
        tracks[method] = track(list(own), list(own.values()), *values)
    return tracks


def start_of(points: SeedPoints) -> dict[str, Any]:
    """The SFT policy of a seed and its judges."""
    pool, accuracy = points.pool, points.proxy_accuracy
    return {
        "seed": points.seed,
        "num_prompts": len(pool.gold),
        "gold": interval(pool.gold.mean(1)),
        "gold_std": float(pool.gold.std()),
        "proxy": interval(pool.proxy.mean(1)),
        "proxy_std": float(pool.proxy.std()),
        "judges_correlation": correlation(pool),
        "proxy_accuracy": asdict(accuracy) if accuracy else None,
    }


def correlation(pool: Measured) -> float | None:
    """Of the judges over a prompt's completions, all prompts together; None if one is constant."""
    gold, proxy = (v - v.mean(1, keepdims=True) for v in (pool.gold, pool.proxy))
    scale = math.sqrt((gold**2).sum() * (proxy**2).sum())
    return float((gold * proxy).sum() / scale) if scale > 0 else None


def points_of(method: str, seed: int, track: Track) -> list[dict[str, Any]]:
    """A method's points of a seed, with intervals over the prompts."""
    return [
        {
            "method": method,
            "seed": seed,
            "setting": setting,
            "distance": float(curves.distance(track.values["kl"][k].mean())),
            **{name: interval(values[k]) for name, values in track.values.items()},
            "length": policy and policy.length,
            "stop_rate": policy and policy.stop_rate,
        }
        for k, (setting, policy) in enumerate(zip(track.settings, track.policies, strict=True))
    ]


def fit_of(method: str, tracks: Sequence[Track]) -> dict[str, Any]:
    """A method's curve over all seeds: the form that is meant for it, and how well each fits."""
    kl, gains = (np.stack([track.values[n] for track in tracks]) for n in ("kl", "gold_gain"))
    form, distances = FORM_OF[method], curves.distance(kl.mean(-1))  # of (S, K, P)
    rmse = {other: curves.fit(other, distances, gains.mean(-1)).rmse for other in curves.FORMS}
    return {
        "method": method,
        "form": form,
        "num_points": int(distances.size),
        "longest_distance": float(distances.max()),
        **{name: finite(found) for name, found in curves.fit_intervals(form, kl, gains).items()},
        "rmse_of_forms": rmse,
    }


def finite(values: curves.Interval | None) -> dict[str, float | None] | None:
    """An interval ready for JSON, with None for an end that is infinite."""
    if values is None:
        return None
    ends = [value if math.isfinite(value) else None for value in values]
    return dict(zip(("value", "low", "high"), ends, strict=True))


def turn_of(method: str, seed: int, track: Track) -> dict[str, Any]:
    """Whether gold had its best before the farthest point, and what the proxy did from there on.

    A method has turned if the interval of the drop in gold lies below 0, and has been
    over-optimised if the proxy did not fall with it.
    """
    peak, gold = curves.drop(track.values["gold_gain"])
    gains, kl = track.values["proxy_gain"], track.values["kl"]
    gold_change = interval(gold)
    proxy_change = interval((gains[-1] - gains[peak])[1::2])  # of the same prompts
    return {
        "method": method,
        "seed": seed,
        "peak": track.settings[peak],
        "last": track.settings[-1],
        "peak_distance": float(curves.distance(kl[peak].mean())),
        "last_distance": float(curves.distance(kl[-1].mean())),
        "gold_change": gold_change,
        "proxy_change": proxy_change,
        "turned": gold_change["high"] < 0,
        "proxy_rose": proxy_change["low"] > 0,
    }


def interval(values: Values) -> dict[str, float]:
    """Mean over prompts (P,) with its bootstrap interval, ready for JSON."""
    return dict(zip(("mean", "low", "high"), mean_interval(values), strict=True))
