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
from common.experiments.overoptimization.best_of_n import best_of_n, best_of_n_kl
from common.experiments.overoptimization.measuring import Measured, Values

BEST_OF_N = "best_of_n"
FORM_OF = {BEST_OF_N: "bon", "rejection": "rl", "dpo": "rl", "grpo": "rl"}  # methods in their order


@dataclass(frozen=True)
class Setting:
    """A policy of a method: by its n, its beta or its step."""

    method: str
    value: float


@dataclass
class SeedPoints:
    """What was measured of a seed's chain.

    Attributes:
        seed: Of all its runs.
        proxy_accuracy: On held-out pairs; None of a proxy that is no model.
        pool: Completions of the SFT policy.
        measured: Completions of the policies, each method's in the order of its settings.
    """

    seed: int
    proxy_accuracy: PreferenceAccuracy | None
    pool: Measured
    measured: Mapping[Setting, Measured]


@dataclass
class Track:
    """A method's points of one seed, prompt by prompt: (K, P) each; gains are over the pool."""

    settings: list[float]
    kl: Values
    gold: Values
    proxy: Values
    gold_gain: Values
    proxy_gain: Values
    lengths: list[float | None]
    stop_rates: list[float | None]


def summarise(seeds: Sequence[SeedPoints], sizes: Sequence[int]) -> dict[str, Any]:
    """Everything that is reported, ready for JSON.

    Args:
        seeds: All with the same settings.
        sizes: Of best of n.
    """
    tracks = {s.seed: tracks_of(s, sizes) for s in seeds}
    methods = [method for method in FORM_OF if method in tracks[seeds[0].seed]]
    return {
        "seeds": [start_of(s) for s in seeds],
        "points": [
            point
            for method in methods
            for seed, own in tracks.items()
            for point in points_of(method, seed, own[method])
        ],
        "fits": [fit_of(m, [own[m] for own in tracks.values()]) for m in methods],
        "turns": [turn_of(m, seed, own[m]) for m in methods for seed, own in tracks.items()],
    }


def tracks_of(points: SeedPoints, sizes: Sequence[int]) -> dict[str, Track]:
    """A seed's points by method, best of n from the pool first."""
    pool = points.pool
    best_gold = best_of_n(pool.proxy, pool.gold, sizes)  # (K, P)
    best_proxy = best_of_n(pool.proxy, pool.proxy, sizes)
    kl = np.array([best_of_n_kl(size) for size in sizes])[:, None] * np.ones_like(best_gold)
    nothing: list[float | None] = [None] * len(sizes)
    base_gold, base_proxy = pool.gold.mean(1), pool.proxy.mean(1)  # (P,)
    gains = (best_gold - base_gold, best_proxy - base_proxy)
    tracks = {BEST_OF_N: Track(list(sizes), kl, best_gold, best_proxy, *gains, nothing, nothing)}
    for method in dict.fromkeys(setting.method for setting in points.measured):
        own = {s.value: m for s, m in points.measured.items() if s.method == method}
        gold = np.stack([m.gold.mean(1) for m in own.values()])  # (K, P)
        proxy = np.stack([m.proxy.mean(1) for m in own.values()])
        kl = np.stack([m.log_ratio.mean(1) for m in own.values()])
        gains = (gold - base_gold, proxy - base_proxy)
        lengths: list[float | None] = [m.length for m in own.values()]
        stop_rates: list[float | None] = [m.stop_rate for m in own.values()]
        tracks[method] = Track(list(own), kl, gold, proxy, *gains, lengths, stop_rates)
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
    gold = pool.gold - pool.gold.mean(1, keepdims=True)
    proxy = pool.proxy - pool.proxy.mean(1, keepdims=True)
    scale = math.sqrt((gold**2).sum() * (proxy**2).sum())
    return float((gold * proxy).sum() / scale) if scale > 0 else None


def points_of(method: str, seed: int, track: Track) -> list[dict[str, Any]]:
    """A method's points of a seed, with intervals over the prompts."""
    return [
        {
            "method": method,
            "seed": seed,
            "setting": setting,
            "distance": float(curves.distance(track.kl[k].mean())),
            "kl": interval(track.kl[k]),
            "gold": interval(track.gold[k]),
            "proxy": interval(track.proxy[k]),
            "gold_gain": interval(track.gold_gain[k]),
            "proxy_gain": interval(track.proxy_gain[k]),
            "length": track.lengths[k],
            "stop_rate": track.stop_rates[k],
        }
        for k, setting in enumerate(track.settings)
    ]


def fit_of(method: str, tracks: Sequence[Track]) -> dict[str, Any]:
    """A method's curve over all seeds: the form that is meant for it, and how well each fits."""
    kl = np.stack([track.kl for track in tracks])  # (S, K, P)
    gains = np.stack([track.gold_gain for track in tracks])
    form = FORM_OF[method]
    distances, means = curves.distance(kl.mean(-1)), gains.mean(-1)
    fitted = curves.fit_intervals(form, kl, gains)
    return {
        "method": method,
        "form": form,
        "num_points": int(distances.size),
        "longest_distance": float(distances.max()),
        **{name: finite(values) for name, values in fitted.items()},
        "rmse_of_forms": {
            other: curves.fit(other, distances, means).rmse for other in curves.FORMS
        },
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
    peak, gold = curves.drop(track.gold_gain)
    proxy = (track.proxy_gain[-1] - track.proxy_gain[peak])[1::2]  # of the same prompts
    gold_change, proxy_change = interval(gold), interval(proxy)
    return {
        "method": method,
        "seed": seed,
        "peak": track.settings[peak],
        "last": track.settings[-1],
        "peak_distance": float(curves.distance(track.kl[peak].mean())),
        "last_distance": float(curves.distance(track.kl[-1].mean())),
        "gold_change": gold_change,
        "proxy_change": proxy_change,
        "turned": gold_change["high"] < 0,
        "proxy_rose": proxy_change["low"] > 0,
    }


def interval(values: Values) -> dict[str, float]:
    """Mean over prompts (P,) with its bootstrap interval, ready for JSON."""
    return dict(zip(("mean", "low", "high"), mean_interval(values), strict=True))
