"""Pairs of completions: where they come from, and what the reference says of them.

Face: config.DPOConfig, groups, comparisons, reference (with reference_cache), from_rollouts.
"""
