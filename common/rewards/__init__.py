"""Rewards of completions by functions and models.

Face: score.RewardFunctions (weighted, applied to rollouts); functions (built in, or found by name);
models (reward models).
"""
