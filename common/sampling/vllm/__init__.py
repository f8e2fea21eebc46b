"""Sampling through a vLLM server that the user has started.

Face: sampler.EngineSampler asks the server that `--rollout_server` names (`config/engine.py`).

Inside: server makes the calls, weights sends the policy, worker is what vLLM's processes load.
"""
