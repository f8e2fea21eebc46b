"""Loading and sharding of models, their attention, and the projection to log-probabilities.

Face: load (models, tokenizers), fsdp (units), rollout_copy (the copy that samples), lora, optim,
shared_prefix (shared_attention: its attention), projection; checks.
"""
