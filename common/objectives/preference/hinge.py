"""Hinge: no gradient beyond a margin. RSO's hinge-norm, Liu et al. 2023, eq. 10.

loss = max(0, 1 - beta D)
D    = log pi_w - log pi_l - (log ref_w - log ref_l)
"""

import torch


def hinge(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    """Loss of each pair (N,).

    >>> chosen, rejected, reference = torch.tensor([[-10.0], [-12.0], [-11.0]])  # D = 2
    >>> hinge(chosen, rejected, reference, reference, beta=0.25)  # 1 - 0.5
    tensor([0.5000])
    """
    logits = chosen_logps - rejected_logps - (ref_chosen_logps - ref_rejected_logps)  # D
    return torch.relu(1 - beta * logits)
