"""Claim: the learning rate, the clip and the step of AdamW are the documented ones.

Targets: schedule values worked by hand, the update of Loshchilov and Hutter (2019, algorithm 2)
written out for scalars, and norms taken by `torch.linalg`. A gradient that is not finite stops the
run before anything has changed. About `common.model.optim`.
"""

import math
from typing import Any

import pytest
import tiny
import torch
from ranks import local, whole
from torch import Tensor, nn
from transformers import Trainer

from common import distributed
from common.config.stages import TrainConfig
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp, optim

pytestmark = pytest.mark.usefixtures("process_group")


def rates(total_steps: int, **fields: Any) -> list[float]:
    config = tiny.train_config(**fields)
    return [optim.learning_rate(step, total_steps, config) for step in range(total_steps)]


def test_schedules_by_hand():
    """Warmup over 3 steps and 4 steps of decay; no step has the rate 0."""
    warm = {"learning_rate": 8.0, "warmup_steps": 3}
    ramp = [2.0, 4.0, 6.0]  # 1/4, 2/4 and 3/4 of the peak
    assert rates(7, lr_scheduler_type="constant", **warm) == pytest.approx([*ramp, 8, 8, 8, 8])
    assert rates(7, lr_scheduler_type="linear", **warm) == pytest.approx([*ramp, 8, 6, 4, 2])
    cosine = rates(7, lr_scheduler_type="cosine", **warm)
    half_root = math.sqrt(0.5)  # cos(pi / 4)
    assert cosine == pytest.approx([*ramp, 8, 4 * (1 + half_root), 4, 4 * (1 - half_root)])
    assert rates(2, lr_scheduler_type="cosine", learning_rate=8.0) == pytest.approx([8, 4])
    assert rates(1, lr_scheduler_type="linear", learning_rate=8.0) == [8]


def test_the_decay_may_end_above_0_as_in_torch():
    """Its cosine has `eta_min`; the linear one ends there too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=7.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=1.0)
    target = []
    for _ in range(20):
        target.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(20, learning_rate=7.0, min_lr=1.0) == pytest.approx(target)
    linear = rates(3, learning_rate=7.0, min_lr=1.0, lr_scheduler_type="linear")
    assert linear == pytest.approx([7, 5, 3])
    with pytest.raises(UserError, match="--min_lr"):
        rates(1, learning_rate=7.0, min_lr=8.0)


class Scalars(nn.Module):
    """A matrix, a bias and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0]]))
        self.bias = nn.Parameter(torch.tensor([0.5]))
        self.frozen = nn.Parameter(torch.tensor([[9.0]]), requires_grad=False)


def config_for_steps(**fields: Any) -> TrainConfig:
    base = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    return tiny.train_config(**(base | fields))


def test_adamw_by_hand():
    """Two steps, each parameter by the scalar formula; only the matrix decays."""
    beta1, beta2, epsilon, decay, lr = 0.9, 0.8, 1e-3, 0.25, 0.1
    config = config_for_steps(adam_beta2=beta2, adam_epsilon=epsilon, weight_decay=decay)
    model = Scalars()
    optimizer = optim.build_optimizer(model, config)
    gradients = [(3.0, -0.5, 2.0), (-1.0, 0.25, 4.0)]
    for step, (a, b, c) in enumerate(gradients):
        model.matrix.grad, model.bias.grad = torch.tensor([[a, b]]), torch.tensor([c])
        optim.clip_and_step(optimizer, config, step, 2)

    def by_hand(value: float, series: list[float], decay: float) -> float:
        mean = variance = 0.0
        for t, gradient in enumerate(series, start=1):
            mean = beta1 * mean + (1 - beta1) * gradient
            variance = beta2 * variance + (1 - beta2) * gradient**2
            value -= lr * decay * value
            corrected = mean / (1 - beta1**t), variance / (1 - beta2**t)
            value -= lr * corrected[0] / (math.sqrt(corrected[1]) + epsilon)
        return value

    columns = [list(column) for column in zip(*gradients, strict=True)]
    expected = [
        by_hand(1.0, columns[0], decay),
        by_hand(-2.0, columns[1], decay),
        by_hand(0.5, columns[2], 0.0),
    ]
    values = [*model.matrix.detach()[0].tolist(), model.bias.item()]
    assert values == pytest.approx(expected, abs=1e-6)
    assert model.frozen.item() == 9.0


def test_the_rate_of_the_step_is_used_and_reported():
    config = config_for_steps(lr_scheduler_type="linear", warmup_steps=1, adam_epsilon=1e-12)
    model = Scalars()
    optimizer = optim.build_optimizer(model, config)
    before = model.bias.item()
    for step, rate in enumerate([0.05, 0.1, 0.05]):
        model.bias.grad = torch.tensor([2.0])
        output = optim.clip_and_step(optimizer, config, step, 3)
        assert output["learning_rate"] == pytest.approx(rate)
        # Under a constant gradient Adam moves by the rate itself.
        assert before - model.bias.item() == pytest.approx(rate, abs=1e-6)
        before = model.bias.item()


MATRICES_OF_BIASES = {"num_local_experts": 4, "head_dim": 8}
WITH_DECAY: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in tiny.FAMILIES]
WITH_DECAY += [("gpt_oss", MATRICES_OF_BIASES), ("cohere", {"use_qk_norm": True})]


@pytest.mark.parametrize(("family", "fields"), WITH_DECAY)
def test_matrices_decay_and_biases_and_norms_do_not(family, fields):
    """A row for each expert or head does not make a matrix of them: as transformers' Trainer."""
    lm = tiny.causal_lm(family, is_plain=True, **fields)
    optimizer = optim.build_optimizer(Policy(lm), config_for_steps(weight_decay=0.5))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decay) == len(list(lm.parameters()))  # each exactly once
    decayed = Trainer.get_decay_parameter_names(None, lm)
    for name, parameter in lm.named_parameters():
        is_decayed = name in decayed and parameter.ndim > 1
        assert decay[id(parameter)] == (0.5 if is_decayed else 0.0), name


class RecordingStep(torch.optim.Optimizer):
    """Keeps the gradients that a step sees."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.trained = parameters
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.seen = [p.grad.detach().clone() for p in parameters if p.grad is not None]


def sharded_policy_with_gradient(scale: float) -> tuple[nn.Module, Tensor]:
    """A sharded tiny policy and its gradient as one vector."""
    policy = fsdp.shard(Policy(tiny.causal_lm("gpt2")), tiny.train_config(), distributed.mesh())
    examples = [tiny.random_ids(n, seed=n) for n in (5, 9)]
    batch = tiny.batch_of(examples, examples[::-1], side="left")
    (scale * policy(batch).token_logps.sum()).backward()
    return policy, flat([p.grad for p in policy.parameters() if p.grad is not None])


def flat(tensors: list[Any]) -> Tensor:
    return torch.cat([whole(tensor).detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize(("limit", "is_clipped"), [(1.0, True), (1e4, False), (0.0, False)])
def test_the_global_norm_is_measured_and_clipped(limit, is_clipped):
    policy, gradient = sharded_policy_with_gradient(1.0)
    optimizer = RecordingStep([p for p in policy.parameters() if p.requires_grad])
    norm = torch.linalg.vector_norm(gradient)
    assert 10 < norm < 1e4
    output = optim.clip_and_step(optimizer, config_for_steps(max_grad_norm=limit), 0, 1)
    assert float(output["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)  # before clipping
    seen = flat(optimizer.seen)
    expected = gradient * (limit / norm) if is_clipped else gradient
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-7)
    if is_clipped:
        assert float(torch.linalg.vector_norm(seen)) == pytest.approx(limit, rel=1e-5)
    assert all(p.grad is None for p in policy.parameters())  # cleared


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(value, limit):
    policy, _ = sharded_policy_with_gradient(1.0)
    config = config_for_steps(max_grad_norm=limit, learning_rate=0.125)
    optimizer = optim.build_optimizer(policy, config)
    before = flat(list(policy.parameters()))
    local(policy.lm.transformer.h[1].mlp.c_fc.bias.grad)[3] = value  # one number in one parameter
    with pytest.raises(RuntimeError) as caught:
        optim.clip_and_step(optimizer, config, 41, 100)
    for phrase in ("step 42", "learning rate 0.125", "nothing was changed", str(abs(value))):
        assert phrase in str(caught.value)
    assert torch.equal(flat(list(policy.parameters())), before)
    assert not optimizer.state  # no moment was updated either


def test_a_loss_that_is_not_finite_changes_nothing_though_the_gradient_is() -> None:
    """As a constant in the loss, a reference of -inf, has no gradient."""
    model = Scalars()
    optimizer = optim.build_optimizer(model, config_for_steps())
    model.matrix.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    losses = torch.tensor([0.5, -math.inf])
    with pytest.raises(optim.NonFiniteError, match="norm is 1.73.* loss of 1 ranks is not finite"):
        optim.clip_and_step(optimizer, config_for_steps(), 0, 2, losses)
    assert model.bias.item() == 0.5
    optim.clip_and_step(optimizer, config_for_steps(), 0, 2, losses[:1])
    assert model.bias.item() != 0.5


def test_the_moments_that_are_missing_take_eight_bytes_a_trained_number() -> None:
    model = Scalars()
    optimizer = optim.build_optimizer(model, config_for_steps())
    num_trained = 3  # the frozen matrix has no moments
    assert optim.missing_state_gb(optimizer) == pytest.approx(8 * num_trained / 1e9)
    model.matrix.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    optim.clip_and_step(optimizer, config_for_steps(), 0, 2)
    assert optim.missing_state_gb(optimizer) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_trained_weight_that_is_not_finite_is_named(value: float) -> None:
    model = Scalars()
    optim.check_weights(model, 3)
    with torch.no_grad():
        model.frozen[0, 0] = value  # as it was read
        optim.check_weights(model, 3)
        model.matrix[0, 1] = value
    with pytest.raises(optim.NonFiniteError, match=r"after step 3 .* the first in matrix:"):
        optim.check_weights(model, 3)
