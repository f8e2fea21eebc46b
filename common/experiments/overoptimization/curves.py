"""Gold reward as a function of the distance d = sqrt(KL(pi || ref)) (Gao et al. 2022, section 3.1).

    R_bon(d) = d (alpha - beta d)        best of n
    R_rl(d)  = d (alpha - beta log d)    reinforcement learning

R is what is gained over the reference, so R(0) = 0. alpha is the slope at the start (of R_rl at
d = 1), beta how fast optimising further stops to pay. Both forms are linear in (alpha, beta): the
least squares have one solution.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORMS = ("bon", "rl")
NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 0
MIN_DISTANCE = 1e-6  # a point nearer to the reference says nothing, and log d has to be finite

Values = NDArray[np.float64]
Interval = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class Fit:
    """A form fitted to points.

    Attributes:
        form: `bon` or `rl`.
        alpha: in units of reward per sqrt(nat).
        beta: of `bon` per nat, of `rl` per sqrt(nat).
        rmse: root of the mean squared residual, in units of reward.
    """

    form: str
    alpha: float
    beta: float
    rmse: float

    def at(self, distances: Values) -> Values:
        """The fitted gain in gold reward at each distance."""
        gains: Values = design(self.form, distances) @ np.array([self.alpha, self.beta])
        return gains

    @property
    def peak(self) -> float | None:
        """The distance at which the gain is largest, None where the curve never turns."""
        if self.beta <= 0 or (self.form == "bon" and self.alpha <= 0):
            return None
        if self.form == "bon":
            return self.alpha / (2 * self.beta)
        exponent = self.alpha / self.beta - 1
        return math.exp(exponent) if exponent < 100 else None  # beyond any distance there is


def design(form: str, distances: Values) -> Values:
    """What alpha and beta are multiplied with: (..., 2)."""
    assert form in FORMS, form
    far = np.maximum(distances, MIN_DISTANCE)
    return np.stack([far, -far * (far if form == "bon" else np.log(far))], axis=-1)


def fit(form: str, distances: Values, gains: Values) -> Fit:
    """Least squares over all points.

    Args:
        form: `bon` or `rl`.
        distances: any shape, sqrt(nats), at least two of them different.
        gains: the same shape, gold reward over that of the reference.
    """
    matrix = design(form, distances).reshape(-1, 2)
    solution = np.linalg.lstsq(matrix, gains.ravel(), rcond=None)[0]
    residuals = matrix @ solution - gains.ravel()
    rmse = float(np.sqrt(np.mean(residuals**2)))
    return Fit(form, float(solution[0]), float(solution[1]), rmse)


def distance(kl: Values) -> Values:
    """sqrt(KL); an estimate below 0, which KL cannot be, counts as 0."""
    return np.sqrt(np.maximum(kl, 0.0))


def fit_intervals(form: str, kl: Values, gains: Values) -> dict[str, Interval | None]:
    """A fit over all seeds, with 95% bootstrap intervals over seeds and prompts.

    Seeds are drawn with replacement, and the prompts, once for all seeds and points of a resample:
    all were measured on the same ones, so a hard prompt is hard for every seed. With few seeds the
    intervals say little about the next seed: of three, one resample in nine is one seed only.

    Args:
        form: `bon` or `rl`.
        kl: (S, K, P) nats, of S seeds with K points each, prompt by prompt.
        gains: (S, K, P) gold reward over that of the reference on the same prompt.

    Returns:
        alpha, beta, peak (a distance; its low or high end is infinite where the curves of the
        resamples do not turn) and rmse, as (value, low, high). peak is None where the fit itself
        does not turn.
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
    peaks = [math.inf if f.peak is None else f.peak for f in draws]
    return {
        "alpha": _interval(whole.alpha, [f.alpha for f in draws]),
        "beta": _interval(whole.beta, [f.beta for f in draws]),
        "peak": None if whole.peak is None else _interval(whole.peak, peaks),
        "rmse": _interval(whole.rmse, [f.rmse for f in draws]),
    }


def _interval(value: float, draws: list[float]) -> Interval:
    low, high = np.quantile(draws, (0.025, 0.975), method="nearest")  # an end may be infinite
    return value, float(low), float(high)


def drop(gains: Values) -> tuple[int, Values]:
    """Where the mean gain is largest, and by how much the last point is below it on other prompts.

    The largest of several means is too large by chance, so the point is looked for on every other
    prompt, and the drop measured on those between.

    Args:
        gains: (K, P) of K points, the one that optimises most last.

    Returns:
        Index of the point, and (P // 2,) differences last - largest of the prompts 1, 3, 5, ...
    """
    peak = int(gains[:, ::2].mean(-1).argmax())
    return peak, (gains[-1] - gains[peak])[1::2]
