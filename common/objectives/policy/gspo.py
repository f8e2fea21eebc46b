"""GSPO: the clip on the ratio of the whole completion. Zheng et al. 2025, eq. 5, 7 and 14.

    loss = -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A)
    rho  = exp(mean_t (log pi - log old)), with the gradient of each token's log-prob

The gradient is the paper's if a completion has one advantage and the aggregation is `grpo`: the
others weigh a completion by its number of tokens.
"""

from math import inf

from common.losses import check_bounds, probability_ratio
from common.objectives.policy.clip import clip_loss


def gspo(logps, old_logps, advantages, mask, *, epsilon_low=3e-4, epsilon_high=4e-4, delta=inf):
    """Loss of each token (B, C), and metrics.

    >>> logps, old_logps = torch.tensor([[[0.5, 0.5]], [[0.25, 0.5]]]).log()  # rho: 2 and 1
    >>> advantages, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> gspo(logps, old_logps, advantages, mask)[0]  # rho = sqrt(2), bounded by 1.0004
    tensor([[-1.0004, -1.0004]])
    """
    check_bounds(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    ratio = probability_ratio(logps, old_logps, mask, ratio_level="sequence")
    return clip_loss(ratio, advantages, mask, 1 - epsilon_low, 1 + epsilon_high, delta)
