"""Sigmoid of log-probs per token. Tülu 3 (Lambert et al. 2024, eq. 6); OLMo 3 has a beta of 5.

loss = -log sigma(beta D), where each log-prob in D is divided by its completion's length
"""

from common.objectives.preference.sigmoid import sigmoid

PER_TOKEN = True
sigmoid_norm = sigmoid
