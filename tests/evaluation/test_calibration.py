"""Claim: the calibration curve is that of scipy's bins on both sides of each pair, and is honest.

Labels drawn with the predicted probabilities are calibrated up to chance; stretched log odds are
not, by the amount that the curve shows.
"""

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binned_statistic

from common.evaluation.comparison import NUM_BINS, calibration


def labelled(scale: float = 1.0, num_pairs: int = 4000, seed: int = 0) -> np.ndarray:
    """Margins of chosen over rejected, `scale` times the true log odds of the label."""
    generator = np.random.default_rng(seed)
    odds = generator.normal(0.0, 1.5, num_pairs)
    is_preferred = generator.random(num_pairs) < expit(odds)
    return scale * np.where(is_preferred, odds, -odds)


def test_the_curve_is_that_of_scipy_on_both_sides() -> None:
    margins = labelled(2.0)
    both = np.concatenate([margins, -margins])
    is_preferred = np.arange(both.size) < margins.size
    p, edges = expit(both), np.linspace(0, 1, NUM_BINS + 1)
    counts = binned_statistic(p, p, "count", bins=edges).statistic
    predicted = binned_statistic(p, p, "mean", bins=edges).statistic
    observed = binned_statistic(p, is_preferred, "mean", bins=edges).statistic
    found = calibration(margins)
    assert [b["count"] for b in found["bins"]] == counts.tolist()
    assert [b["predicted"] for b in found["bins"]] == pytest.approx(predicted.tolist())
    assert [b["observed"] for b in found["bins"]] == pytest.approx(observed.tolist())
    error = np.sum(counts / counts.sum() * np.abs(observed - predicted))
    assert found["ece"] == pytest.approx(error)
    assert found["log_loss"] == pytest.approx(-np.log(expit(margins)).mean())


def test_labels_drawn_as_predicted_are_calibrated_up_to_chance() -> None:
    errors = [calibration(labelled(seed=seed))["ece"] for seed in range(20)]
    assert calibration(labelled())["ece_by_chance"] == pytest.approx(np.mean(errors), rel=0.25)


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_log_odds_of_the_wrong_size_are_seen(scale: float) -> None:
    found = calibration(labelled(scale))
    odds = np.random.default_rng(0).normal(0.0, 1.5, 4000)
    truth = np.abs(expit(odds) - expit(scale * odds)).mean()
    assert found["ece"] == pytest.approx(truth, abs=0.015)
    assert found["ece"] > 5 * found["ece_by_chance"]
    top = found["bins"][-1]
    if top["count"]:
        assert top["predicted"] is not None
        assert top["high"] is not None
        assert top["high"] < top["predicted"]  # overconfident


def test_the_curve_is_symmetric_and_says_what_it_knows_of_a_bin() -> None:
    edge = math.log(10 / 5)  # p = 10/15, where a bin ends
    found = calibration(np.array([edge, -edge, 0.0, 40.0, -800.0, 0.3]))
    assert sum(b["count"] for b in found["bins"]) == 12
    for there, back in zip(found["bins"], found["bins"][::-1], strict=True):
        assert there["count"] == back["count"]
        if there["count"]:
            assert there["predicted"] == pytest.approx(1 - back["predicted"])
            assert there["observed"] == pytest.approx(1 - back["observed"])
            assert there["low"] == pytest.approx(1 - back["high"])
    assert any(b["count"] == 0 and b["predicted"] is None for b in found["bins"])
    assert found["bins"][-1]["observed"] == 0.5  # one sure and right, one sure and wrong


def test_a_coin_has_the_log_loss_ln_2_and_no_error() -> None:
    found = calibration(np.zeros(10))
    assert found["log_loss"] == pytest.approx(math.log(2))
    assert found["ece"] == 0
    sure = calibration(np.array([-1000.0, 1000.0]))  # without overflow
    assert (sure["log_loss"], sure["bins"][0]["predicted"], sure["bins"][-1]["predicted"]) == (
        500,
        0,
        1,
    )
