"""None: relative to the mean of the prompt's completions, not scaled. Dr. GRPO, Liu et al. 2025.

A = r - mean r
"""

from common.advantages import deviations_from_mean


def none(rewards):
    """Advantages (N, G)."""
    return deviations_from_mean(rewards)
