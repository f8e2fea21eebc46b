"""Mask of completions that the sampler draws otherwise than the trainer. Li et al. 2025.

    loss = loss_before where low <= exp(mean_t (log old - log mu)) <= high, else 0

"Trust region masking": a completion's length has no influence. SkyRL's bounds are 0.99 and 1.01.
"""

from common.losses import masked_sum, precise


def geometric_mask(loss, old_logps, sampled_logps, mask, *, low=0.5, high=2.0):
    """Loss of each token (B, C), and metrics.

    >>> loss, mask = torch.tensor([[1.2, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> old_logps, sampled_logps = torch.tensor([[[0.5, 0.5]], [[0.05, 0.5]]]).log()
    >>> geometric_mask(loss, old_logps, sampled_logps, mask)[0]  # sqrt(10 * 1) is over 2
    tensor([[0., 0.]])
    """
    gaps = (precise(old_logps) - precise(sampled_logps)).detach()
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    mean = (masked_sum(gaps, mask, dim=1)[:, None] / lengths).exp()  # (B, 1)
    weights = ((mean >= low) & (mean <= high)).to(loss.dtype).expand_as(loss)
    return loss * weights, {"sampler_weight": weights}
