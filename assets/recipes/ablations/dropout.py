"""Dropout 0.1 is on in the training forward of a reward model: no bug, but off in every stage here.

Huang et al. (2024) leave it out too. Its noise is torch's own, so losses depend on the number of
ranks and on the micro-batches. A prompt that completions share would lose the same activations for
all of them: `--layout padded`.
"""

import torch
from torch import nn

from common.batch import AnyBatch
from common.forward import RewardModel

SHARE = 0.1  # of activations that are set to 0
forward = RewardModel.forward


def forward_with_dropout(model: RewardModel, batch: AnyBatch) -> torch.Tensor:
    """As `RewardModel.forward`; dropout is on where a gradient is wanted, and until the next."""
    for part in model.modules():
        for layer in part.children():
            if isinstance(layer, nn.Dropout):
                layer.p = SHARE if torch.is_grad_enabled() else 0.0
                layer.training = part.training = True  # attention asks the module that has it
    return forward(model, batch)


RewardModel.forward = forward_with_dropout  # type: ignore[method-assign, assignment]
