"""Sigmoid of log-probs per token. Tülu 3 (Lambert et al. 2024, eq. 6); OLMo 3 has a beta of 5.

loss = -log sigma(beta D), where each log-prob in D is divided by its completion's length

>>> chosen, rejected, reference = torch.tensor([[-1.0], [-3.0], [-2.0]])  # per token: D = 2
>>> sigmoid_norm(chosen, rejected, reference, reference, beta=0.5)  # ln(1 + exp(-1))
tensor([0.3133])
"""

from common.objectives.preference.sigmoid import sigmoid

PER_TOKEN = True
sigmoid_norm = sigmoid
