"""Robust DPO: unbiased for labels that are wrong with chance e. Chowdhury et al. 2024.

    loss = [-(1 - e) log sigma(beta D) + e log sigma(-beta D)] / (1 - 2e)

Its mean over labels that are flipped with chance e, label_smoothing, is the loss on the true ones.
"""

from common.objectives.preference.sigmoid import check_smoothing, logistic_loss


def robust(
    chosen_logps,
    rejected_logps,
    ref_chosen_logps,
    ref_rejected_logps,
    beta,
    *,
    label_smoothing=0.0,
):
    """Loss of each pair (N,).

    By hand, for beta D = 1 and a tenth: (0.9 ln(1 + exp(-1)) - 0.1 ln(1 + exp(1))) / 0.8.

    >>> chosen, rejected, reference = torch.tensor([[-10.0], [-12.0], [-11.0]])  # D = 2
    >>> robust(chosen, rejected, reference, reference, beta=0.5, label_smoothing=0.1)
    tensor([0.1883])
    """
    check_smoothing(label_smoothing)
    logits = chosen_logps - rejected_logps - (ref_chosen_logps - ref_rejected_logps)  # D
    return logistic_loss(beta * logits, -label_smoothing / (1 - 2 * label_smoothing))
