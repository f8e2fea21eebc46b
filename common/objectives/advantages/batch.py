"""Batch: relative to the prompt's mean, in units of the batch's deviation. TRL's `batch`.

    A = (r - mean r) / (std of all rewards of the batch + 1e-4)

ScaleRL (Khatri et al. 2025) has it. The batch are the groups that are counted, of all processes.
"""

from common.advantages import EPSILON, deviations_from_mean, global_moments


def batch(rewards, counted, all_reduce):
    """Advantages (N, G).

    >>> rewards = torch.tensor([[1.0, 0.0], [5.0, 4.0]])  # means 0.5 and 4.5; deviation 2.38
    >>> batch(rewards, torch.tensor([True, True]), lambda sums: sums)
    tensor([[ 0.2100, -0.2100],
            [ 0.2100, -0.2100]], dtype=torch.float64)
    """
    _, std = global_moments(rewards[counted].double(), all_reduce)
    return deviations_from_mean(rewards) / (std + EPSILON)
