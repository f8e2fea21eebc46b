"""MaxRL: in units of the prompt's mean reward. Tajwar et al. 2026.

    A = (r - mean r) / mean r, 0 where the mean is 0

Of rewards 0 and 1 the expected gradient is that of log P(reward 1) to order G - 1:
(1 - (1 - p)^(G - 1)) / p times the gradient of p.
"""

import torch

from common.advantages import deviations_from_mean

MIN_REWARD = 0.0


def mean(rewards):
    """Advantages (N, G).

    >>> mean(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))  # 0.5 / 0.5
    tensor([[ 1., -1., -1.,  1.]], dtype=torch.float64)
    """
    level = rewards.double().mean(dim=1, keepdim=True)  # (N, 1)
    return torch.where(level > 0, deviations_from_mean(rewards) / level, 0.0)
