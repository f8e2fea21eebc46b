"""IPO: a target for D, not a limit that it grows to. Azar et al. 2023, eq. 17.

loss = (D - 1 / (2 beta))^2
D    = log pi_w - log pi_l - (log ref_w - log ref_l)
"""


def ipo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    """Loss of each pair (N,).

    >>> chosen, rejected, reference = torch.tensor([[-10.0], [-12.0], [-11.0]])  # D = 2
    >>> ipo(chosen, rejected, reference, reference, beta=0.5)  # (2 - 1)^2
    tensor([1.])
    """
    logits = chosen_logps - rejected_logps - (ref_chosen_logps - ref_rejected_logps)  # D
    return (logits - 1 / (2 * beta)) ** 2
