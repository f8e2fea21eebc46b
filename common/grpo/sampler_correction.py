"""Correction for a sampler whose log-probabilities differ from the trainer's."""

import torch
from torch import Tensor

from common.losses import check_choice, precise

SAMPLER_CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_weights(
    old_token_logps: Tensor,
    sampled_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    correction: str,
    cap: float,
) -> Tensor:
    """Importance weights (B, C) correcting for a sampler that differs from the trainer.

    w = exp(old - sampled), of each token (`token_...`) or of the whole completion (`sequence_...`),
    with the trainer's log-probs `old_token_logps` and the sampler's `sampled_token_logps`, (B, C)
    each. Without gradient. 1 everywhere with `none`, and at token level at padding.

    - `..._truncate`: min(w, cap), cap at least 1: truncated importance sampling (Yao et al. 2025).
    - `..._mask`: w where 1 / cap <= w <= cap, else 0 (IcePop, 2025, which has two bounds).
    """
    check_choice("correction", correction, SAMPLER_CORRECTIONS)
    log_weights = (precise(old_token_logps) - precise(sampled_token_logps)).detach()
    log_weights = torch.where(completion_mask, log_weights, 0.0)
    if correction == "none":
        return torch.ones_like(log_weights)
    if correction.startswith("sequence"):
        log_weights = log_weights.sum(dim=1, keepdim=True).expand_as(log_weights)  # (B, C)
    weights = log_weights.exp()
    if correction.endswith("truncate"):
        return weights.clamp(max=cap)
    return torch.where((weights >= 1 / cap) & (weights <= cap), weights, 0.0)
