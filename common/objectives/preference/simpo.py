"""SimPO: log-probs per token and a margin, without a reference. Meng et al. 2024, eq. 6.

loss = -log sigma(beta (log pi_w / |y_w| - log pi_l / |y_l|) - gamma)
"""

from common.objectives.preference.sigmoid import check_smoothing, logistic_loss

PER_TOKEN = True


def simpo(chosen_logps, rejected_logps, beta, *, gamma=0.0, label_smoothing=0.0):
    """Loss of each pair (N,).

    >>> chosen, rejected = torch.tensor([[-1.0], [-2.0]])  # per token
    >>> simpo(chosen, rejected, beta=2.0, gamma=1.0)  # ln(1 + exp(-1))
    tensor([0.3133])
    """
    check_smoothing(label_smoothing)
    return logistic_loss(beta * (chosen_logps - rejected_logps) - gamma, label_smoothing)
