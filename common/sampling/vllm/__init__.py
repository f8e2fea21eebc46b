"""Sampling through a vLLM server that the user has started.

Face: sampler.EngineSampler asks the server; config.EngineConfig has its flag, `--rollout_server`.
Nothing outside of the room uses anything else.

Inside: server makes the calls, weights sends the policy, worker is what vLLM's processes load.
"""
