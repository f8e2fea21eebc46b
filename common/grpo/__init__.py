"""From a step's prompts to the micro-batches that GRPO trains on.

Face: rollouts, which computes rewards and selects candidates; minibatches, which makes
micro-batches of them; monitor, which logs the steps; held_out.HeldOut, which evaluates.
"""
