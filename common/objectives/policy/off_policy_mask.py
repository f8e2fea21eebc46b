"""Mask of completions with a negative advantage that are far from the sampler. DeepSeek-V3.2 2025.

    loss = 0 where A < 0 and mean_t (log mu - log pi) > threshold, else loss_before

Section 3.1. mu is the sampler's probability; the threshold is in nats per token, its default ours.
"""

from common.losses import masked_sum, precise


def off_policy_mask(loss, logps, sampled_logps, advantages, mask, *, threshold=0.1):
    """Loss of each token (B, C), and metrics.

    >>> loss, mask = torch.tensor([[1.2, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> logps, sampled_logps = torch.tensor([[[0.25, 0.5]], [[0.5, 0.5]]]).log()
    >>> off_policy_mask(loss, logps, sampled_logps, -mask.float(), mask)[0]  # ln 2 / 2 is over 0.1
    tensor([[0., 0.]])
    """
    gaps = precise(sampled_logps) - precise(logps).detach()  # (B, C)
    lengths = mask.sum(dim=1).clamp(min=1)
    is_far = masked_sum(gaps, mask, dim=1) / lengths > threshold  # (B,)
    is_out = (advantages < 0) & is_far[:, None]  # (B, C)
    return loss * ~is_out, {"off_policy_fraction": is_out}
