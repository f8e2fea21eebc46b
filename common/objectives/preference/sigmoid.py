"""Sigmoid: the loss of DPO. Rafailov et al. 2023, eq. 7.

    loss = -(1 - e) log sigma(beta D) - e log sigma(-beta D)
    D    = log pi_w - log pi_l - (log ref_w - log ref_l)

With label_smoothing e > 0, the share of wrong labels, conservative DPO (Mitchell 2023).
"""

import torch.nn.functional as F  # noqa: N812


def sigmoid(
    chosen_logps,
    rejected_logps,
    ref_chosen_logps,
    ref_rejected_logps,
    beta,
    *,
    label_smoothing=0.0,
):
    """Loss of each pair (N,).

    >>> chosen, rejected, reference = torch.tensor([[-10.0], [-12.0], [-11.0]])  # D = 2
    >>> sigmoid(chosen, rejected, reference, reference, beta=0.5)  # ln(1 + exp(-1))
    tensor([0.3133])
    """
    check_smoothing(label_smoothing)
    logits = chosen_logps - rejected_logps - (ref_chosen_logps - ref_rejected_logps)  # D
    return logistic_loss(beta * logits, label_smoothing)


def check_smoothing(label_smoothing):
    """Raise ValueError outside of [0, 0.5)."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing} but must lie in [0, 0.5)")


def logistic_loss(logits, e):
    """-log sigma(logits) of labels that are wrong with chance e."""
    return -(1 - e) * F.logsigmoid(logits) - e * F.logsigmoid(-logits)
