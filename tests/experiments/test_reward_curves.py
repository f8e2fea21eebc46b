"""Claim: both forms of Gao et al. (2022) are fitted by least squares, and peak where they say.

Targets: points made by the paper's formulas as they are written, a search over a fine grid, and
seeds whose own fits are known.
"""

import math

import numpy as np
import pytest

from experiments.overoptimization import curves
from experiments.overoptimization.curves import Fit, drop, fit, fit_intervals

D = np.array([0.0, 0.4, 0.8, 1.5, 2.5, 4.0])


def literal(form: str, d: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """The formulas of section 3.1, with R(0) = 0."""
    inner = beta * d if form == "bon" else beta * np.log(np.where(d > 0, d, 1.0))
    return d * (alpha - inner)


@pytest.mark.parametrize(("form", "alpha", "beta"), [("bon", 0.7, 0.2), ("rl", 0.3, 0.4)])
def test_the_parameters_of_exact_points_are_found(form, alpha, beta):
    found = fit(form, D, literal(form, D, alpha, beta))
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), abs=1e-5)
    assert found.rmse == pytest.approx(0, abs=1e-5)
    fine = np.linspace(0.01, 6, 100_000)
    curve = literal(form, fine, alpha, beta)
    assert found.peak == pytest.approx(fine[curve.argmax()], abs=1e-3)
    assert found.at(fine) == pytest.approx(curve, abs=1e-4)


@pytest.mark.parametrize("form", curves.FORMS)
def test_no_other_parameters_have_a_smaller_residual(form):
    gains = np.random.default_rng(0).normal(size=D.shape)
    found = fit(form, D, gains)

    def rmse(alpha: float, beta: float) -> float:
        return math.sqrt(np.mean((literal(form, D, alpha, beta) - gains) ** 2))

    assert rmse(found.alpha, found.beta) == pytest.approx(found.rmse, abs=1e-6)
    for step in (-1e-2, 1e-2):
        assert rmse(found.alpha + step, found.beta) > found.rmse
        assert rmse(found.alpha, found.beta + step) > found.rmse


def test_a_curve_that_does_not_turn_has_no_peak():
    assert Fit("bon", 1.0, -0.1, 0).peak == math.inf
    assert Fit("bon", -1.0, 0.1, 0).peak == math.inf
    assert Fit("rl", 1.0, 0.0, 0).peak == math.inf
    assert Fit("rl", 1.0, 1e-5, 0).peak == math.inf  # beyond any distance


def test_an_estimate_of_kl_below_zero_counts_as_zero():
    assert curves.distance(np.array([-0.01, 4.0])).tolist() == [0.0, 2.0]


def test_intervals_hold_the_seeds_own_fits():
    """Prompts that are all alike leave only the draw of the seeds."""
    alphas = (0.5, 0.7, 0.9)
    kl = np.broadcast_to((D**2)[None, :, None], (3, len(D), 4))
    gains = np.stack([literal("bon", D, alpha, 0.1) for alpha in alphas])[..., None]
    found = fit_intervals("bon", kl, np.broadcast_to(gains, kl.shape))
    value, low, high = found["alpha"].values()
    assert value == pytest.approx(0.7, abs=1e-6)
    assert (low, high) == pytest.approx((0.5, 0.9), abs=1e-6)  # 1 draw in 27 is of one seed thrice
    assert list(found["beta"].values()) == pytest.approx((0.1, 0.1, 0.1), abs=1e-6)


def test_seeds_that_are_alike_do_not_narrow_the_interval():
    """The prompts are the same for all of them, and so is what is hard about a prompt."""
    generator = np.random.default_rng(5)
    kl = np.broadcast_to(np.array([0.25, 1.0, 4.0])[:, None], (3, 64))
    slopes = generator.normal(1.0, 0.5, 64)
    gains = np.sqrt(kl) * (slopes - 0.2 * np.sqrt(kl))
    widths = []
    for num_seeds in (1, 4):
        shape = (num_seeds, *kl.shape)
        _, low, high = fit_intervals(
            "bon", np.broadcast_to(kl, shape), np.broadcast_to(gains, shape)
        )["alpha"].values()
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], rel=0.1)


def test_intervals_are_those_of_the_prompts_where_seeds_are_alike():
    """The mean gain of P prompts varies by std / sqrt(P), and alpha as its slope in d."""
    generator = np.random.default_rng(3)
    noise = generator.normal(size=400)
    kl = np.broadcast_to(np.array([1.0])[None, :, None], (1, 1, 400))
    kl = np.concatenate([kl, 4 * kl], axis=1)  # d = 1 and 2
    gains = np.stack([0.5 + noise, 2 * (0.5 + noise)])[None]  # R = (0.5 + noise) d on each prompt
    value, low, high = fit_intervals("bon", kl, gains)["alpha"].values()
    assert value == pytest.approx(0.5 + noise.mean())
    assert high - low == pytest.approx(2 * 1.96 * noise.std() / 20, rel=0.1)


def test_resamples_that_do_not_turn_leave_the_peak_open():
    d = np.array([1.0, 2.0])
    kl = np.broadcast_to((d**2)[None, :, None], (2, 2, 3))
    gains = np.stack([literal("bon", d, 1.0, 0.3), literal("bon", d, 1.0, -0.1)])[..., None]
    value, _, high = fit_intervals("bon", kl, np.broadcast_to(gains, kl.shape))["peak"].values()
    assert value == pytest.approx(5.0)  # of beta 0.1, the mean
    assert high == math.inf


def test_a_drop_is_from_the_largest_mean_of_every_other_prompt_to_the_last_on_those_between():
    gains = np.array([[0.0, 9.0, 0.2, 9.0], [1.0, 0.5, 0.6, 0.1], [0.9, 0.3, 0.1, 0.2]])
    peak, change = drop(gains)
    assert peak == 1
    assert change == pytest.approx([-0.2, 0.1])


def test_flat_curves_seldom_look_as_if_they_turned():
    """The largest of ten equal means, tested on its own prompts, did so in one case of eight."""
    generator = np.random.default_rng(6)
    turned = 0
    for _ in range(400):
        _, change = drop(generator.normal(size=(10, 128)))
        error = change.std(ddof=1) / len(change) ** 0.5
        turned += change.mean() + 1.96 * error < 0
    assert 0.005 <= turned / 400 <= 0.05  # 2.5% within three standard errors
