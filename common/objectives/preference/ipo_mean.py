"""IPO of log-probs per token: TRL's form of Azar et al. 2023, eq. 17.

loss = (D - 1 / (2 beta))^2, where each log-prob in D is divided by its completion's length
"""

from common.objectives.preference.ipo import ipo

PER_TOKEN = True
ipo_mean = ipo
