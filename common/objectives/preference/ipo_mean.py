"""IPO of log-probs per token: TRL's form of Azar et al. 2023, eq. 17.

loss = (D - 1 / (2 beta))^2, where each log-prob in D is divided by its completion's length

>>> chosen, rejected, reference = torch.tensor([[-1.0], [-3.0], [-2.0]])  # per token: D = 2
>>> ipo_mean(chosen, rejected, reference, reference, beta=0.5)  # (2 - 1)^2
tensor([1.])
"""

from common.objectives.preference.ipo import ipo

PER_TOKEN = True
ipo_mean = ipo
