"""Pairs of completions: their flags, where they come from, and their reference log-probs.

Face: config.DPOConfig, reward_config.RewardConfig, margins, reference, from_rollouts.
"""
