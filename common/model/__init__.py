"""Loading and sharding of models, their attention, and the projection to log-probabilities.

Face: load (models, tokenizers), fsdp (units), replica (the copy that samples), lora, optim,
shared_prefix (branches: its attention), projection; checks.
"""
