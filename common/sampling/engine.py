"""The choice between this project's sampler and a vLLM server."""

from torch import nn

from common.config.engine import EngineConfig
from common.sampling.sampler import Sampler
from common.text.example import Vocabulary


def new_sampler(policy: nn.Module, vocabulary: Vocabulary, config: EngineConfig) -> Sampler:
    """This project's sampler, or that of `--rollout_server`. Collective."""
    if not config.rollout_server:
        return Sampler(policy, vocabulary, config)
    from common.sampling.vllm.sampler import EngineSampler

    return EngineSampler(policy, vocabulary, config)
