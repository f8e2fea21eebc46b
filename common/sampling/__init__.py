"""How completions are drawn from a policy.

Face: sampler.Sampler and its Rollouts; decode (one token at a time), token_records (for tables).
"""
