"""What a completion is worth to functions and models.

Face: scorer.RewardScorer (with what a completion costs that did not stop); functions (built in, or
found by name); call (checked and weighted); models (reward models and encoders).
"""
