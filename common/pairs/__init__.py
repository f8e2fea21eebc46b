"""Pairs of completions: where they come from, and what the reference says of them.

Face: config.DPOConfig, reward_config.RewardConfig, margins, reference (and
its cache), from_rollouts.
"""
