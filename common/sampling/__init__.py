"""How completions are drawn from a policy.

Face: sampler.Sampler and its Rollouts, token_records (for tables); decode draws one token at a time
for many samples, shared keeps the keys and values of a prompt once for all of them.

Beside them vLLM: engine.new_sampler makes either, engine_config.EngineConfig has the flags; server,
weights and vllm_worker are what vLLM is asked, sent, and loads by.
"""
