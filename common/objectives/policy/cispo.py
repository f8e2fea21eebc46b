"""CISPO: a bound on a token's weight, not on its gradient. MiniMax-M1 2025, eq. 4-5.

loss = -sg(min(rho, 1 + epsilon_high)) A log pi, where sg stops the gradient
"""

import torch

from common.losses import check_bounds, clipped_tokens, probability_ratio


def cispo(logps, old_logps, advantages, mask, *, epsilon_high=0.2, ratio_level="token"):
    """Loss of each token (B, C), and metrics."""
    check_bounds(epsilon_high=epsilon_high)
    ratio = probability_ratio(logps, old_logps, mask, ratio_level=ratio_level)
    bounded = ratio.clamp(max=1 + epsilon_high)
    gain = (bounded * advantages).detach() * torch.where(mask, logps, 0.0)
    is_clipped = clipped_tokens(bounded, ratio, advantages, mask)
    return torch.where(mask, -gain, 0.0), {"clip_fraction": is_clipped}
