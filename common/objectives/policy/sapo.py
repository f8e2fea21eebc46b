"""SAPO: a soft gate in the place of the clip. Gao et al. 2025 (arXiv 2511.20347), eq. 5.

    loss = -(4 / tau) sigma(tau (rho - 1)) A, with tau_pos where A > 0, else tau_neg

The gate's slope is 1 at rho = 1 and falls to 0 on both sides: far ratios count less.
"""

import torch

from common.losses import probability_ratio


def sapo(logps, old_logps, advantages, mask, *, tau_pos=1.0, tau_neg=1.05, ratio_level="token"):
    """Loss of each token (B, C).

    >>> logps, old_logps = torch.tensor([[[0.5, 0.5]], [[0.25, 0.5]]]).log()  # rho: 2 and 1
    >>> advantages, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> sapo(logps, old_logps, advantages, mask)  # -4 sigma(1) and -4 sigma(0)
    tensor([[-2.9242, -2.0000]])
    """
    ratio = probability_ratio(logps, old_logps, mask, ratio_level=ratio_level)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return torch.where(mask, -gate * advantages, 0.0)
