"""From a model's folder to a sharded module, and from hidden states to log-probabilities.

Face: load (models, tokenizers), fsdp (units), replica (the copy that samples), lora, optim,
shared_prefix (branches: its attention), projection; checks.
"""
