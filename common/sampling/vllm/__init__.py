"""Sampling through a vLLM server that the user has started.

Face: sampler.new_sampler makes this project's sampler, or with `--rollout_server` one that asks the
server; config.EngineConfig has that flag. Nothing outside of the room uses anything else.

Inside: server makes the calls, weights sends the policy, worker is what vLLM's processes load.
"""
