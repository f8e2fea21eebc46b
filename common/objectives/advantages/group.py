"""Group: relative to the other completions of the prompt, in units of their deviation.

    A = (r - mean r) / (std r + 1e-4)

DeepSeekMath 2024, section 4.1.2; the standard deviation is the unbiased one.
"""

from common.advantages import EPSILON, deviations_from_mean


def group(rewards):
    """Advantages (N, G).

    >>> group(torch.tensor([[1.0, 0.0, 2.0]]))  # mean 1, deviation 1
    tensor([[ 0.0000, -0.9999,  0.9999]], dtype=torch.float64)
    """
    deviations = deviations_from_mean(rewards)
    return deviations / (deviations.std(dim=1, keepdim=True) + EPSILON)
