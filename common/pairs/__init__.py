"""Pairs of completions: their flags, where they come from, and their reference log-probs.

Face: config.DPOConfig, reward_config.RewardConfig, reference, from_rollouts, implicit_reward.
"""
