"""Clip: PPO (Schulman et al. 2017, eq. 7) as used by GRPO (DeepSeekMath 2024, eq. 3).

    loss = -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A)

The two bounds are DAPO's (Yu et al. 2025, eq. 8). Where A < 0 the minimum leaves rho without an
upper bound: `delta`, above 1 + epsilon_high, is one (dual clip, Ye et al. 2020).
"""

from math import inf

import torch

from common.losses import check_bounds, clipped_tokens, probability_ratio


def clip(logps, old_logps, advantages, mask, *, epsilon_low=0.2, epsilon_high=0.2, delta=inf):
    """Loss of each token (B, C), and metrics.

    >>> logps, old_logps = torch.tensor([[[0.5, 0.5]], [[0.25, 0.5]]]).log()  # rho: 2 and 1
    >>> advantages, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> clip(logps, old_logps, advantages, mask)[0]  # -min(2, 1.2) and -1
    tensor([[-1.2000, -1.0000]])
    """
    check_bounds(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    ratio = probability_ratio(logps, old_logps, mask)
    return clip_loss(ratio, advantages, mask, 1 - epsilon_low, 1 + epsilon_high, delta)


def clip_loss(ratio, advantages, mask, low, high, delta):
    """The loss (B, C) by the ratio: no gradient where a bound is active."""
    if delta <= high:
        raise ValueError(f"delta is {delta} but must exceed 1 + epsilon_high = {high}")
    bounded = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(low, delta))
    gain = bounded * advantages
    is_clipped = clipped_tokens(bounded, ratio, advantages, mask)
    return torch.where(mask, -gain, 0.0), {"clip_fraction": is_clipped}
