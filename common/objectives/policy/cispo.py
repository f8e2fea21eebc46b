"""CISPO: a bound on a token's weight, not on its gradient. MiniMax-M1 2025, eq. 4-5.

loss = -sg(min(rho, 1 + epsilon_high)) A log pi, where sg stops the gradient
"""

import torch

from common.losses import check_bounds, clipped_tokens, probability_ratio


def cispo(logps, old_logps, advantages, mask, *, epsilon_high=0.2, ratio_level="token"):
    """Loss of each token (B, C), and metrics.

    >>> logps, old_logps = torch.tensor([[[0.5, 0.5]], [[0.25, 0.5]]]).log()  # rho: 2 and 1
    >>> advantages, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> cispo(logps, old_logps, advantages, mask)[0]  # 1.2 ln 2 and ln 2
    tensor([[0.8318, 0.6931]])
    """
    check_bounds(epsilon_high=epsilon_high)
    ratio = probability_ratio(logps, old_logps, mask, ratio_level=ratio_level)
    bounded = ratio.clamp(max=1 + epsilon_high)
    gain = (bounded * advantages).detach() * torch.where(mask, logps, 0.0)
    is_clipped = clipped_tokens(bounded, ratio, advantages, mask)
    return torch.where(mask, -gain, 0.0), {"clip_fraction": is_clipped}
