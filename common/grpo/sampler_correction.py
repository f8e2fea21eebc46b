"""Correction for a sampler whose log-probabilities differ from the trainer's."""

import torch
from torch import Tensor

from common.losses import check_choice, masked_sum, precise

SAMPLER_CORRECTIONS = (
    *("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "geometric_mask",
)


def sampler_weights(
    old_token_logps: Tensor,
    sampled_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    correction: str,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Importance weights (B, C) correcting for a sampler that differs from the trainer.

    w = exp(old - sampled), of each token (`token_...`) or of the whole completion (`sequence_...`),
    with the trainer's log-probs `old_token_logps` and the sampler's `sampled_token_logps`, (B, C)
    each. Without gradient. 1 everywhere with `none`, and at token level at padding.

    - `..._truncate`: min(w, cap), cap at least 1: truncated importance sampling (Yao et al. 2025).
    - `..._mask`: w where floor <= w <= cap, else 0 (IcePop, 2025); a floor of 0 is 1 / cap.
    - `geometric_mask`: 1 where the geometric mean of w over the completion lies in these bounds,
      else 0: a mask of completions that does not depend on their length (Li et al. 2025, "Trust
      region masking"; SkyRL's bounds are 0.99 and 1.01).
    """
    check_choice("correction", correction, SAMPLER_CORRECTIONS)
    log_weights = (precise(old_token_logps) - precise(sampled_token_logps)).detach()
    log_weights = torch.where(completion_mask, log_weights, 0.0)
    if correction == "none":
        return torch.ones_like(log_weights)
    if not correction.startswith("token"):
        sums = log_weights.sum(dim=1, keepdim=True)  # (B, 1)
        if correction == "geometric_mask":
            sums = sums / completion_mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_weights = sums.expand_as(log_weights)  # (B, C)
    weights = log_weights.exp()
    if correction.endswith("truncate"):
        return weights.clamp(max=cap)
    kept = torch.ones_like(weights) if correction == "geometric_mask" else weights
    return torch.where((weights >= (floor or 1 / cap)) & (weights <= cap), kept, 0.0)


def off_policy_mask(
    token_logps: Tensor,
    sampled_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    threshold: float,
) -> Tensor:
    """Mask (B, C), False = left out: a negative advantage, and too far from the sampler.

    Too far is mean_t (log sampler - log pi) > threshold, in nats per token of the completion
    (DeepSeek-V3.2, 2025, section 3.1). Advantages are (B,), or (B, C) of tokens.
    """
    gaps = precise(sampled_token_logps) - precise(token_logps).detach()  # (B, C)
    lengths = completion_mask.sum(dim=1).clamp(min=1)
    is_far = masked_sum(gaps, completion_mask, dim=1) / lengths > threshold  # (B,)
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    return ~((advantages < 0) & is_far[:, None]).expand_as(completion_mask)


def sampler_drift(token_logps: Tensor, sampled_token_logps: Tensor) -> Tensor:
    """Penalty (B, C) on the drift from the sampler: (log pi - log mu)^2 (Kimi K2.5, 2026).

    Its gradient pulls each sampled token's log-prob back to that at which it was sampled.
    """
    return (precise(token_logps) - precise(sampled_token_logps).detach()) ** 2
