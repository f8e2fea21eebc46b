"""How completions are drawn from a policy.

Face: sampler.Sampler and its Rollouts; decode draws one token at a time for many samples, shared
keeps the keys and values of a prompt once for all of them, graphs replays a step on a GPU. The room
vllm has a sampler that asks a vLLM server instead.
"""
