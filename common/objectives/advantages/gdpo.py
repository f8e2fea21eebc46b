"""GDPO: each reward function is normalised in its group. Liu et al. 2026.

    A = sum_f w_f (r_f - mean r_f) / (std r_f + 1e-4), then normalised over the batch

GRPO normalises the weighted sum of the rewards.
"""

import torch

from common.advantages import are_equal
from common.objectives.advantages.group import group

NORMALIZE_GLOBALLY = True


def gdpo(rewards_by_function, weights):
    """Advantages (N, G); functions have the weights.

    >>> by_function = torch.tensor([[[1.0, 0.0, 2.0]], [[0.0, 10.0, 20.0]]])  # deviations 1 and 10
    >>> gdpo(by_function, [1.0, 0.5])  # (0, -1, 1) + 0.5 (-1, 0, 1)
    tensor([[-0.5000, -0.9999,  1.4999]])
    """
    pairs = zip(rewards_by_function, weights, strict=True)
    terms = torch.stack([weight * group(rewards).float() for rewards, weight in pairs])  # (F, N, G)
    total = terms.sum(dim=0)
    cancels = are_equal(total, terms.abs().sum(dim=0), len(terms) + 2)  # but for rounding
    return torch.where(cancels, 0.0, total)
