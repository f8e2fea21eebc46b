"""Claim: the files of objectives compute what the code before them did.

About `common/objectives`. `recorded.json` was written once, by commit a51f9ae, when losses and
advantages were branches of a few functions: values and gradients in float64, on random numbers that
`common.noise` makes. They agree to the bit there; other kernels of exp and log round otherwise.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common import losses
from common.advantages import group_advantages, normalise_globally
from common.noise import uniform
from common.objectives.kinds import Advantages, PolicyObjective, PreferenceLoss

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo")
SEED = 30


def draw(stream: int, *shape: int) -> Tensor:
    """Uniform numbers of a stream."""
    numbers = torch.arange(torch.Size(shape).numel())
    return uniform(SEED + stream, numbers, 0).view(shape).double()


def agrees(key: str, *values: Tensor) -> None:
    ours = torch.cat([value.flatten() for value in values]).double()
    expected = torch.tensor(RECORDED[key], dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def preference_cases() -> list[tuple[str, float, float]]:
    cases = []
    for name in ("sigmoid", "sigmoid_norm", "robust", "ipo", "ipo_mean", "hinge", "simpo"):
        smoothings = (0.0, 0.1) if name in SMOOTHED else (0.0,)
        margins = (0.0, 0.5) if name == "simpo" else (0.0,)
        cases += [(name, *both) for both in itertools.product(smoothings, margins)]
    return cases


@pytest.mark.parametrize(("name", "smoothing", "gamma"), preference_cases())
def test_preference_losses(name: str, smoothing: float, gamma: float):
    logps = [(-20 * draw(i, 16)).requires_grad_() for i in range(4)]
    chosen, rejected = (1 + (draw(4 + i, 16) * 40).long() for i in range(2))
    options = {"label_smoothing": smoothing, "gamma": gamma, "beta": 0.3, "loss_type": name}
    sizes = {"chosen_lengths": chosen, "rejected_lengths": rejected}
    loss = losses.preference_loss(logps[0], logps[1], logps[2], logps[3], **options, **sizes)
    gradients = torch.autograd.grad(loss.sum(), logps[:2])
    agrees(f"{name} {smoothing} {gamma}", loss, gradients[0], gradients[1])
    settings = {n: value for n, value in options.items() if value and n != "loss_type"}
    direct = PreferenceLoss.find([name], **settings)
    pairs = [torch.stack(each, -1) for each in (logps[:2], logps[2:], [chosen, rejected])]
    assert torch.equal(direct(pairs[0], pairs[1], pairs[2]), loss)


def rewards_of(stream: int = 7) -> Tensor:
    rewards = draw(stream, 4, 6) * 3
    rewards[1] = rewards[1, 0]
    rewards[2] = (rewards[2] > 1.5).double()
    return rewards


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none", "mean"])
def test_advantages(scale: str, baseline: str, is_counted: bool):
    counted = torch.tensor([True, False, True, True]) if is_counted else None
    values = group_advantages(rewards_of(), scale=scale, baseline=baseline, counted=counted)
    agrees(f"adv {scale} {baseline} {counted is None}", values)


def test_gdpo():
    values = Advantages.find(["gdpo"])(torch.stack([rewards_of(), draw(8, 4, 6)]), [1.0, 0.5])
    agrees("gdpo", values)
    everything = torch.ones(4, 6, dtype=torch.bool)
    agrees("gdpo global", normalise_globally(values, everything, lambda sums: sums))


@pytest.mark.parametrize("floor", [0.0, 0.9])
@pytest.mark.parametrize(
    "correction",
    [
        *("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        "geometric_mask",
    ],
)
def test_files_behind_an_objective(correction: str, floor: float):
    """The clip, the off-policy mask, weights, and the drift, where the mask is True."""
    names, arguments = ["clip", "off_policy_mask"], ["threshold=0.1", "coef=0.3"]
    if correction == "geometric_mask":
        names.append(correction)
        arguments += [f"low={floor or 0.5}", "high=2"]
    elif correction != "none":
        names.append("sampler_weights")
        arguments += [f"correction={correction}", "cap=2", f"floor={floor}"]
    logps, old, sampled = (-3 * draw(i, 4, 5) for i in range(3))
    mask, advantages = draw(3, 4, 5) < 0.8, draw(4, 4) - 0.5
    objective = PolicyObjective.find([*names, "sampler_drift"], arguments)
    loss, _ = objective(logps, old, sampled, advantages, mask)
    key = f"wrapped {correction} {floor}"
    expected = torch.tensor(RECORDED[key], dtype=torch.float64).view(4, 5)
    agrees(key, torch.where(mask, loss, expected))  # before, the drift was masked later
