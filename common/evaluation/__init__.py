"""What systems are worth: on pairs, and by what they generate.

Face: score, pair_scores, pair_judging, comparison, quality, win_rates, judges, completions; for
what may be concluded intervals, paired_statistics, calibration and length_control.
"""
