"""What a completion is worth to functions and models.

Face: scorer.RewardScorer; functions (built in, or found by name), call (checked and weighted),
notes, encoders; kept (what could not be rewarded).
"""
