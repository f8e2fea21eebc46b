"""From a step's prompts to the micro-batches that GRPO trains on.

Face: config.GRPOConfig, rollouts (rewards, what is kept), minibatches, table (what is recorded).
"""
