"""Pairs of completions: their log-probabilities under the reference.

Face: reference.
"""
