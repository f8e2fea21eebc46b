"""RLOO: relative to the mean of the other completions. Ahmadian et al. 2024.

    A = r - mean of the others' r = G / (G - 1) (r - mean r)

With the setting `scale` it is divided as the file of that name does: none, group or batch; true is
group.
"""

from common.losses import check_choice
from common.objectives.advantages.batch import batch
from common.objectives.advantages.group import group
from common.objectives.advantages.none import none

IN_GROUP = {"none": none, "false": none, "group": group, "true": group}


def rloo(rewards, counted, all_reduce, *, scale="none"):
    """Advantages (N, G).

    >>> rloo(torch.tensor([[1.0, 0.0, 2.0]]), None, None)  # 1 - 2/2, 0 - 3/2, 2 - 1/2
    tensor([[ 0.0000, -1.5000,  1.5000]], dtype=torch.float64)
    """
    check_choice("scale", scale, (*IN_GROUP, "batch"))
    scaled = batch(rewards, counted, all_reduce) if scale == "batch" else IN_GROUP[scale](rewards)
    num_generations = rewards.shape[1]
    return scaled * num_generations / (num_generations - 1)
