"""Gold reward as a function of the distance d = sqrt(KL(pi || ref)) (Gao et al. 2022, section 3.1).

    R_bon(d) = d (alpha - beta d)        best of n
    R_rl(d)  = d (alpha - beta log d)    reinforcement learning

R is the gain over the reference, so R(0) = 0. Both forms are linear in (alpha, beta): the least
squares have one solution.

Best of n draws n completions and returns the one with the highest proxy reward. It is never run:
every n up to N is estimated from the same N samples of a prompt, and its KL is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_DISTANCE = 1e-6  # log d has to be finite

Values = NDArray[np.float64]


def best_of_n(proxy: ArrayLike, values: ArrayLike, sizes: Sequence[int]) -> Values:
    """The expected value of the completion with the highest proxy of n, (S, P) for S sizes n.

    `proxy` (P, N) chooses among N samples of P prompts, `values` (P, N) is what is averaged: the
    proxy itself, or a gold reward.

    The mean over all subsets of n of the N samples (Nakano et al. 2021, appendix I; Gao et al.
    2022, section 2): with the samples in ascending order of the proxy, the i-th of them, counted
    from 1, is the best of C(i - 1, n - 1) of the C(N, n) subsets. It is unbiased for every n up to
    N. Samples with equal proxy rewards are chosen equally often.
    """
    proxy, values = np.asarray(proxy, np.float64), np.asarray(values, np.float64)
    assert proxy.shape == values.shape, f"{proxy.shape} of the proxy, {values.shape} values"
    in_order = np.empty_like(values)  # (P, N), worst first, each the mean of those it ties with
    for row, judged, averaged in zip(in_order, proxy, values, strict=True):
        _, slots, counts = np.unique(judged, return_inverse=True, return_counts=True)
        row[:] = np.repeat(np.bincount(slots, averaged) / counts, counts)
    num_samples = proxy.shape[1]
    assert 1 <= min(sizes) <= max(sizes) <= num_samples, f"{sizes} of {num_samples} samples"
    worse = range(num_samples)
    shares = [[math.comb(i, n - 1) / math.comb(num_samples, n) for i in worse] for n in sizes]
    result: Values = np.array(shares) @ in_order.T
    return result


def best_of_n_kl(size: int) -> float:
    """KL(best of n || policy) = log n - (n - 1) / n, in nats (Stiennon et al. 2020, appendix G.3).

    Exact where no two completions of a prompt have the same proxy reward and each has a small
    probability; for a policy with finite support an upper bound (Beirami et al. 2024, theorem 1).
    """
    return math.log(size) - (size - 1) / size


@dataclass(frozen=True)
class Fit:
    """A form fitted to points."""

    form: str  # `bon` or `rl`
    alpha: float  # units of reward per sqrt(nat)
    beta: float  # of `bon` per nat, of `rl` per sqrt(nat)
    rmse: float  # root of the mean squared residual, units of reward

    def at(self, distances: Values) -> Values:
        """The fitted gain in gold reward at each distance."""
        gains: Values = design(self.form, distances) @ np.array([self.alpha, self.beta])
        return gains


def design(form: str, distances: Values) -> Values:
    """The factors of alpha and beta, (..., 2)."""
    far = np.maximum(distances, MIN_DISTANCE)
    return np.stack([far, -far * (far if form == "bon" else np.log(far))], axis=-1)


def fit(form: str, distances: Values, gains: Values) -> Fit:
    """Least squares of gains over the reference at distances, sqrt(nats), both of any shape."""
    matrix = design(form, distances).reshape(-1, 2)
    solution = np.linalg.lstsq(matrix, gains.ravel(), rcond=None)[0]
    rmse = float(np.sqrt(np.mean((matrix @ solution - gains.ravel()) ** 2)))
    return Fit(form, float(solution[0]), float(solution[1]), rmse)


def distance(kl: float) -> float:
    """sqrt(KL); an estimate below 0, which KL cannot be, counts as 0."""
    return math.sqrt(max(kl, 0.0))


def drop(gains: Values) -> tuple[int, Values]:
    """The point of K with the largest mean of gains (K, P), and last - largest, (P // 2,).

    The largest of several means is too large by chance, so the point is searched on every other
    prompt, and the drop measured on those between: 1, 3, 5, ...
    """
    peak = int(gains[:, ::2].mean(-1).argmax())
    return peak, (gains[-1] - gains[peak])[1::2]
