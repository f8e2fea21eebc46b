"""Gold reward as a function of the distance d = sqrt(KL(pi || ref)) (Gao et al. 2022, section 3.1).

    R_bon(d) = d (alpha - beta d)        best of n
    R_rl(d)  = d (alpha - beta log d)    reinforcement learning

R is what is gained over the reference, so R(0) = 0. alpha is the slope at the start (of R_rl at
d = 1), beta how fast optimising further stops to pay. Both forms are linear in (alpha, beta): the
least squares have one solution.

A policy that draws n completions and gives out the one that a proxy reward likes best is never
run: every n up to N is estimated from the same N samples of a prompt, and its KL is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FORMS = ("bon", "rl")
NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 0
MIN_DISTANCE = 1e-6  # a point nearer to the reference says nothing, and log d has to be finite

Values = NDArray[np.float64]


# ---- best of n -----------------------------------------------------------------------------------


def best_of_n(proxy: ArrayLike, values: ArrayLike, sizes: Sequence[int]) -> Values:
    """The expected value of the completion that the proxy likes best among n, (S, P) for S sizes n.

    `proxy` (P, N) chooses among N samples of P prompts, `values` (P, N) is what is wanted of the
    chosen one: the proxy itself, or a gold reward.

    The mean over all subsets of n of the N samples (Nakano et al. 2021, appendix I; Gao et al.
    2022, section 2): with the samples in ascending order of the proxy, the i-th of them, counted
    from 1, is the best of C(i - 1, n - 1) of the C(N, n) subsets. It is unbiased for every n up to
    N, and varies less than n samples drawn for the purpose. Of equal proxy rewards each is taken as
    often as the others.
    """
    proxy, values = np.asarray(proxy, np.float64), np.asarray(values, np.float64)
    assert proxy.shape == values.shape, f"{proxy.shape} of the proxy, {values.shape} values"
    assert proxy.ndim == 2, f"shape {proxy.shape}, prompts and samples expected"
    in_order = np.empty_like(values)  # (P, N), worst first, each the mean of those it ties with
    for row, judged, wanted in zip(in_order, proxy, values, strict=True):
        _, places, counts = np.unique(judged, return_inverse=True, return_counts=True)
        row[:] = np.repeat(np.bincount(places, wanted) / counts, counts)
    num_samples = proxy.shape[1]
    assert 1 <= min(sizes) <= max(sizes) <= num_samples, f"{sizes} of {num_samples} samples"
    worse = range(num_samples)
    shares = [[math.comb(i, n - 1) / math.comb(num_samples, n) for i in worse] for n in sizes]
    result: Values = np.array(shares) @ in_order.T
    return result


def best_of_n_kl(size: int) -> float:
    """KL(best of n || policy) = log n - (n - 1) / n, in nats (Stiennon et al. 2020, appendix G.3).

    Exact where no two completions of a prompt have the same proxy reward and each has a small
    probability. Completions that come more than once are ties with themselves, so for a policy with
    finite support this is an upper bound (Beirami et al. 2024, theorem 1).
    """
    return math.log(size) - (size - 1) / size


# ---- the fitted forms ----------------------------------------------------------------------------


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

    @property
    def peak(self) -> float:
        """The distance at which the gain is largest, infinite where the curve never turns."""
        if self.beta <= 0 or (self.form == "bon" and self.alpha <= 0):
            return math.inf
        if self.form == "bon":
            return self.alpha / (2 * self.beta)
        exponent = self.alpha / self.beta - 1
        return math.exp(exponent) if exponent < 100 else math.inf  # beyond any distance there is


def design(form: str, distances: Values) -> Values:
    """What alpha and beta are multiplied with: (..., 2)."""
    assert form in FORMS, form
    far = np.maximum(distances, MIN_DISTANCE)
    return np.stack([far, -far * (far if form == "bon" else np.log(far))], axis=-1)


def fit(form: str, distances: Values, gains: Values) -> Fit:
    """Least squares of gains over the reference at distances, sqrt(nats), both of any shape."""
    matrix = design(form, distances).reshape(-1, 2)
    solution = np.linalg.lstsq(matrix, gains.ravel(), rcond=None)[0]
    rmse = float(np.sqrt(np.mean((matrix @ solution - gains.ravel()) ** 2)))
    return Fit(form, float(solution[0]), float(solution[1]), rmse)


def distance(kl: Values) -> Values:
    """sqrt(KL); an estimate below 0, which KL cannot be, counts as 0."""
    return np.sqrt(np.maximum(kl, 0.0))


def fit_intervals(form: str, kl: Values, gains: Values) -> dict[str, dict[str, float]]:
    """A fit over all seeds, with 95% bootstrap intervals over seeds and prompts.

    Seeds are drawn with replacement, and the prompts, once for all seeds and points of a resample:
    all were measured on the same ones, so a hard prompt is hard for every seed. With few seeds the
    intervals say little about the next seed: of three, one resample in nine is one seed only.

    Of S seeds with K points each `kl` (S, K, P) has nats, prompt by prompt, and `gains` (S, K, P)
    gold reward over that of the reference. Found are alpha, beta, peak (infinite where a curve does
    not turn) and rmse, each as value, low, high.
    """
    whole = fit(form, distance(kl.mean(-1)), gains.mean(-1))
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    num_seeds, _, num_prompts = kl.shape
    draws: list[Fit] = []
    for _ in range(NUM_RESAMPLES):
        seeds = generator.integers(0, num_seeds, num_seeds)
        prompts = generator.integers(0, num_prompts, num_prompts)
        some_kl, some_gains = (values[seeds][:, :, prompts].mean(-1) for values in (kl, gains))
        draws.append(fit(form, distance(some_kl), some_gains))
    found = {}
    for name in ("alpha", "beta", "peak", "rmse"):
        drawn = [getattr(one, name) for one in draws]
        low, high = np.quantile(drawn, (0.025, 0.975), method="nearest")  # an end may be infinite
        found[name] = {"value": getattr(whole, name), "low": float(low), "high": float(high)}
    return found


def drop(gains: Values) -> tuple[int, Values]:
    """At which of K points the mean of gains (K, P) is largest, and last - largest, (P // 2,).

    The largest of several means is too large by chance, so the point is looked for on every other
    prompt, and the drop measured on those between: 1, 3, 5, ...
    """
    peak = int(gains[:, ::2].mean(-1).argmax())
    return peak, (gains[-1] - gains[peak])[1::2]
