"""What systems are worth: on pairs, and by what they generate.

Face: score, pair_scores, comparison, completions, win_rates and judges; intervals for what may be
concluded.
"""
