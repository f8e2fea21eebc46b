"""AdamW, learning-rate schedules, and the one optimiser step that every stage takes."""

import math
import re
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from common import distributed
from common.config.stages import TrainConfig

# Biases and norms, which may have a row for each expert or head; as transformers' Trainer (5.23)
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm($|\.)", re.IGNORECASE)


class AdamW(torch.optim.AdamW):
    """AdamW that keeps its parameters in the module's order, over which a norm sums."""

    trained: Sequence[nn.Parameter]


def build_optimizer(module: nn.Module, config: TrainConfig) -> AdamW:
    """Fused AdamW over the trainable shards; weight decay on matrices, not on biases and norms."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim > 1 and not NO_DECAY.search(name)]
    others = [p for name, p in named if p.ndim < 2 or NO_DECAY.search(name)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        groups,
        lr=config.learning_rate,
        betas=(0.9, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    optimizer.trained = [p for _, p in named]
    # The fused kernel (torch 2.13) does not count as a change, which `BFloat16Copies` looks for.
    optimizer.register_step_post_hook(lambda *_: increment_version(optimizer.trained))
    return optimizer


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of a step counted from 0: linear warmup to the peak, then the decay."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    share = 1 - progress  # of the way from the smallest rate to the peak
    if config.lr_scheduler_type == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.learning_rate - config.min_lr) * share


def missing_state_gb(optimizer: AdamW) -> float:
    """GB that AdamW's moments will take on this rank, 0 once they are there."""
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in optimizer.trained]
    return 0.0 if optimizer.state else 2 * sum(shard.nbytes for shard in shards) / 1e9


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; nothing has been changed."""


def clip_and_step(
    optimizer: AdamW,  # gradients are already reduced
    config: TrainConfig,  # a `max_grad_norm` of 0 only measures
    step: int,  # counted from 0
    total_steps: int,
    losses: torch.Tensor | None = None,  # of this rank's micro-batches; only checked
) -> dict[str, torch.Tensor | float]:
    """Check that loss and gradient are finite, clip its global norm, step, clear. Collective.

    Returns `grad_norm`, the L2 norm over all parameters on all ranks before clipping (a scalar
    tensor), and `learning_rate`, of this step. A NonFiniteError if a loss or the norm is not
    finite; nothing has been changed then.
    """
    lr = learning_rate(step, total_steps, config)
    trainable = [p for p in optimizer.trained if p.requires_grad]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainable if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    # A constant in a loss, as a reference of -inf, need not show in the gradient.
    is_finite = norm.isfinite() if losses is None else losses.isfinite().all()
    bad_losses = distributed.all_reduce_sum((~is_finite).to(norm))
    if not bool(norm.isfinite() & (bad_losses == 0)):
        raise NonFiniteError(
            f"at step {step + 1} the gradient norm is {float(norm)} and the loss of "
            f"{int(bad_losses)} ranks is not finite (learning rate {lr:g}); nothing was changed."
        )
    if config.max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(trainable, config.max_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": norm, "learning_rate": lr}


def check_weights(module: nn.Module, step: int) -> None:
    """Raise a NonFiniteError if a trained weight is not finite after so many steps. Collective.

    Loss and gradient are checked before an update, which may still overflow. It waits for the
    device.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    shards = [p.to_local() if isinstance(p, DTensor) else p for _, p in trained]
    is_bad = torch.stack([~shard.isfinite().all() for shard in shards])  # (parameters,)
    bad = distributed.all_reduce_sum(is_bad.float()).tolist()
    names = [name for (name, _), number in zip(trained, bad, strict=True) if number]
    if names:
        raise NonFiniteError(
            f"after step {step} there are weights that are not finite, the first in {names[0]}: "
            "they are not saved (lower --learning_rate, or raise --adam_epsilon)."
        )
