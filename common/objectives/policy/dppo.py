"""DPPO: bounds on the change of the probability, not of the ratio. Qi et al. 2026.

    loss = -sg(min(rho, delta)) A log pi, where sg stops the gradient and rho = pi / mu
           0 where A > 0 and pi - mu > epsilon_high, or A < 0 and pi - mu < -epsilon_low

mu is the sampler's probability. |pi - mu| is the total variation if all other tokens count as one.
"""

from math import inf

import torch

from common.losses import check_bounds, clipped_tokens, probability_ratio


def dppo(logps, sampled_logps, advantages, mask, *, epsilon_low=0.2, epsilon_high=0.2, delta=inf):
    """Loss of each token (B, C), and metrics.

    >>> logps, sampled_logps = torch.tensor([[[0.5, 0.5]], [[0.25, 0.5]]]).log()  # pi, then mu
    >>> advantages, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> dppo(logps, sampled_logps, advantages, mask)[0]  # pi - mu = 0.25 is over 0.2; ln 2
    tensor([[0.0000, 0.6931]])
    """
    check_bounds(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    ratio = probability_ratio(logps, sampled_logps, mask)
    change = logps.detach().exp() - sampled_logps.exp()  # pi - mu
    is_outside = torch.where(advantages > 0, change > epsilon_high, change < -epsilon_low)
    bounded = ratio.clamp(max=delta).masked_fill(is_outside, 0.0)
    gain = (bounded * advantages).detach() * torch.where(mask, logps, 0.0)
    is_clipped = clipped_tokens(bounded, ratio, advantages, mask)
    return torch.where(mask, -gain, 0.0), {"clip_fraction": is_clipped}
