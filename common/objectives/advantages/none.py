"""None: relative to the mean of the prompt's completions, not scaled. Dr. GRPO, Liu et al. 2025.

A = r - mean r
"""

from common.advantages import deviations_from_mean


def none(rewards):
    """Advantages (N, G).

    >>> none(torch.tensor([[1.0, 0.0, 2.0]]))
    tensor([[ 0., -1.,  1.]], dtype=torch.float64)
    """
    return deviations_from_mean(rewards)
