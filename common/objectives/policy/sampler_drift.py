"""Penalty on the drift from the sampler. Kimi K2.5, 2026; prime-rl's coef is 1e-3.

    loss = loss_before + coef (log pi - log mu)^2

Its gradient pulls each sampled token's log-prob back to that at which it was sampled.
"""

import torch

from common.losses import precise


def sampler_drift(loss, logps, sampled_logps, mask, *, coef=1e-3):
    """Loss of each token (B, C)."""
    drift = torch.where(mask, precise(logps) - precise(sampled_logps), 0.0)
    return loss + coef * drift**2
