"""From a model's folder to a sharded module, and from hidden states to log-probabilities.

Face: load (models, tokenizers), fsdp (units, the rollout copy), lora, optim, shared_prefix,
projection; checks.
"""
