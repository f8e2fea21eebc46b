"""Importance weights, correcting for a sampler that differs from the trainer.

    loss = w loss_before, w = exp(log old - log mu) of each token, or of the whole completion

    token_truncate, sequence_truncate   min(w, cap): truncated weights (Yao et al. 2025)
    token_mask, sequence_mask           w where floor <= w <= cap, else 0 (IcePop, 2025)

mu is the sampler's probability; a floor of 0 is 1 / cap.
"""

import torch

from common.losses import check_choice, precise

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
WEIGHS_SAMPLES = True  # a sampler that cannot draw every token has no such weights


def sampler_weights(
    loss, old_logps, sampled_logps, mask, *, correction="token_truncate", cap=2.0, floor=0.0
):
    """Loss of each token (B, C); the weights have no gradient.

    >>> loss, mask = torch.tensor([[-1.2, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> old_logps, sampled_logps = torch.tensor([[[0.5, 0.5]], [[0.1, 0.5]]]).log()
    >>> sampler_weights(loss, old_logps, sampled_logps, mask)[0]  # times min(5, 2) and 1
    tensor([[-2.4000, -1.0000]])
    """
    check_choice("correction", correction, CORRECTIONS)
    if cap < 1:
        raise ValueError(f"cap is {cap} but must be at least 1")
    log_weights = (precise(old_logps) - precise(sampled_logps)).detach()
    log_weights = torch.where(mask, log_weights, 0.0)
    if correction.startswith("sequence"):
        log_weights = log_weights.sum(dim=1, keepdim=True).expand_as(log_weights)
    weights = log_weights.exp()
    if correction.endswith("truncate"):
        weights = weights.clamp(max=cap)
    else:
        weights = torch.where((weights >= (floor or 1 / cap)) & (weights <= cap), weights, 0.0)
    return loss * weights, {"sampler_weight": weights}
