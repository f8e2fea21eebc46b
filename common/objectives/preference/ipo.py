"""IPO: a target for D, not a limit that it grows to. Azar et al. 2023, eq. 17.

loss = (D - 1 / (2 beta))^2
D    = log pi_w - log pi_l - (log ref_w - log ref_l)
"""


def ipo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    """Loss of each pair (N,)."""
    logits = chosen_logps - rejected_logps - (ref_chosen_logps - ref_rejected_logps)  # D
    return (logits - 1 / (2 * beta)) ** 2
