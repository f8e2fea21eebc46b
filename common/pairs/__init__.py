"""Pairs of completions: where they come from, and their reference log-probs.

Face: reference, from_rollouts.
"""
