"""From measured policies to results: points over the distance, and which methods turned.

Pure functions of the judges' values; every interval is of 95%. K points of a method, P held-out
prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.evaluation.intervals import mean_interval
from experiments.runs.overoptimization.curves import Values, best_of_n, best_of_n_kl, distance, drop


@dataclass
class Measured:
    """K completions of each of P prompts by one policy."""

    gold: Values  # (P, K) of the judge that is not optimised
    proxy: Values  # (P, K) of the optimised reward, with its penalty for not stopping
    log_ratio: Values  # (P, K) log pi - log ref, nats: their mean is unbiased for KL(pi || ref)


@dataclass
class SeedPoints:
    """The measured policies of a seed's chain."""

    seed: int  # of all its runs
    pool: Measured  # completions of the SFT policy
    policies: Mapping[str, Mapping[float, Measured]]  # by method, then by its n, beta or step


Point = dict[str, Any]  # of a policy: `setting`; of each prompt (P,) `kl`, rewards and gains


def summarise(seeds: Sequence[SeedPoints], sizes: Sequence[int]) -> dict[str, Any]:
    """The results, ready for JSON: of seeds with the same settings, and sizes n."""
    tracks = {seed_points.seed: tracks_of(seed_points, sizes) for seed_points in seeds}
    methods = dict.fromkeys(method for track in tracks.values() for method in track)
    every = [
        (method, seed, track[method])
        for method in methods
        for seed, track in tracks.items()
        if track.get(method)
    ]
    return {
        "seeds": [start_of(seed_points) for seed_points in seeds],
        "points": [point_of(method, seed, p) for method, seed, track in every for p in track],
        "turns": [turn_of(*track) for track in every],
    }


def tracks_of(seed_points: SeedPoints, sizes: Sequence[int]) -> dict[str, list[Point]]:
    """A seed's points by method, each in the order of its settings."""
    pool = seed_points.pool

    def point(setting: float, kl: Values, gold: Values, proxy: Values) -> Point:
        gains = {"gold_gain": gold - pool.gold.mean(1), "proxy_gain": proxy - pool.proxy.mean(1)}
        return {"setting": setting, "kl": kl, "gold": gold, "proxy": proxy, **gains}

    gold, proxy = (best_of_n(pool.proxy, values, sizes) for values in (pool.gold, pool.proxy))
    kl = [np.full(len(pool.gold), best_of_n_kl(size)) for size in sizes]
    tracks = {"best_of_n": list(map(point, sizes, kl, gold, proxy))}
    for method, policies in seed_points.policies.items():
        tracks[method] = [
            point(setting, m.log_ratio.mean(1), m.gold.mean(1), m.proxy.mean(1))
            for setting, m in policies.items()
        ]
    return tracks


def start_of(seed_points: SeedPoints) -> dict[str, Any]:
    """The SFT policy of a seed: its gold reward, and both rewards' deviation over completions."""
    pool = seed_points.pool
    stds = {"gold_std": float(pool.gold.std()), "proxy_std": float(pool.proxy.std())}
    return {"seed": seed_points.seed, "gold": interval(pool.gold.mean(1)), **stds}


def point_of(method: str, seed: int, point: Point) -> dict[str, Any]:
    """A method's point of a seed, with intervals over the prompts."""
    values = {k: interval(v) if isinstance(v, np.ndarray) else v for k, v in point.items()}
    far = distance(float(point["kl"].mean()))
    return {"method": method, "seed": seed, "distance": far, **values}


def turn_of(method: str, seed: int, track: Sequence[Point]) -> dict[str, Any]:
    """The changes in gold and proxy reward from the setting with the most gold to the last one."""
    peak, change = drop(np.stack([point["gold_gain"] for point in track]))
    best, last = track[peak], track[-1]
    return {
        "method": method,
        "seed": seed,
        "peak": best["setting"],
        "last": last["setting"],
        "gold_change": interval(change),
        "proxy_change": interval((last["proxy_gain"] - best["proxy_gain"])[1::2]),  # same prompts
    }


def interval(values: Values) -> dict[str, float]:
    """Mean over prompts (P,) with its bootstrap interval, ready for JSON."""
    return dict(zip(("mean", "low", "high"), mean_interval(values), strict=True))
