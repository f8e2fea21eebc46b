"""Group: relative to the other completions of the prompt, in units of their deviation.

    A = (r - mean r) / (std r + 1e-4)

DeepSeekMath 2024, section 4.1.2; the standard deviation is the unbiased one.
"""

from common.advantages import EPSILON, deviations_from_mean


def group(rewards):
    """Advantages (N, G)."""
    deviations = deviations_from_mean(rewards)
    return deviations / (deviations.std(dim=1, keepdim=True) + EPSILON)
