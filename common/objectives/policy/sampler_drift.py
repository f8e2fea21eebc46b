"""Penalty on the drift from the sampler. Kimi K2.5, 2026; prime-rl's coef is 1e-3.

    loss = loss_before + coef (log pi - log mu)^2

Its gradient pulls each sampled token's log-prob back to that at which it was sampled.
"""

import torch

from common.losses import precise


def sampler_drift(loss, logps, sampled_logps, mask, *, coef=1e-3):
    """Loss of each token (B, C).

    >>> loss, mask = torch.tensor([[-1.2, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> logps, sampled_logps = torch.tensor([[[0.5, 0.5]], [[0.25, 0.5]]]).log()
    >>> sampler_drift(loss, logps, sampled_logps, mask, coef=1.0)  # + (ln 2)^2 and + 0
    tensor([[-0.7195, -1.0000]])
    """
    drift = torch.where(mask, precise(logps) - precise(sampled_logps), 0.0)
    return loss + coef * drift**2
