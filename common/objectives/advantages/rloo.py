"""RLOO: relative to the mean of the other completions. Ahmadian et al. 2024.

    A = r - mean of the others' r = G / (G - 1) (r - mean r)

With scale_rewards it is divided as the file of that name does.
"""

from common.objectives.kinds import Advantages, call


def rloo(rewards, counted, all_reduce, *, scale_rewards="none"):
    """Advantages (N, G)."""
    values = {"rewards": rewards, "counted": counted, "all_reduce": all_reduce}
    scaled = call(Advantages.function_of(scale_rewards), values)
    num_generations = rewards.shape[1]
    return scaled * num_generations / (num_generations - 1)
