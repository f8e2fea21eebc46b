"""The reward head is made after sharding, by each rank for itself, with bfloat16 parameters.

So does github.com/wuwowuyi/DPO-and-GRPO-implementation: FSDP does not know of the head, so that its
gradient is not summed over ranks; every rank draws another one; rank 0's is saved; and most of
AdamW's updates are lost to rounding. In one process only the last of these is left. The script's
own check finds the first two: `--self_check false`.
"""

from typing import Any

import torch
from torch import nn

from common import distributed
from common.forward import RewardModel
from common.model import fsdp, optim

shard, clip_and_step = fsdp.shard, optim.clip_and_step
heads: list[torch.Tensor] = []


class BFloat16Head(nn.Linear):
    """A head that computes in the dtype of its weight."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rewards (B, 1) in bfloat16 of hidden states (B, D)."""
        return super().forward(hidden.to(self.weight.dtype))


def shard_then_make_head(module: Any, *args: Any, **options: Any) -> Any:
    """As `fsdp.shard`, and then the head anew."""
    module = shard(module, *args, **options)
    if isinstance(module, RewardModel):
        width = module.lm.score.weight.shape[1]
        head = BFloat16Head(width, 1, bias=False, dtype=torch.bfloat16, device=distributed.device())
        seed = 1000 * args[0].seed + distributed.rank()
        drawn = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
        head.weight.data.copy_(drawn * (width + 1) ** -0.5)
        module.lm.score = head
        heads[:] = [head.weight]
    return module


def step_with_head_apart(*args: Any) -> Any:
    """As `optim.clip_and_step`; the head's gradient is updated with and not clipped."""
    for weight in heads:  # away from the norm, which cannot mix sharded and other parameters
        weight.requires_grad_(False)
    result = clip_and_step(*args)
    for weight in heads:
        weight.requires_grad_(True)
    return result


fsdp.shard = shard_then_make_head
optim.clip_and_step = step_with_head_apart  # type: ignore[assignment]
