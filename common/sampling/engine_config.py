"""The flags of an engine that samples in place of `sampler.Sampler`, and what excludes it."""

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from common.config import CommonConfig, flag, free_flag

LEAST_TEMPERATURE = 0.01  # vLLM takes a lower one for this


@dataclass
class EngineConfig(CommonConfig):
    """The fields of every stage that samples what it scores."""

    _engine: ClassVar = "what samples (docs/rollout_engine.md)"
    rollout_engine: str = flag("own", "own: this project's sampler; vllm: vLLM", ["own", "vllm"])
    rollout_server: str = free_flag(
        "", "vllm: URL of a server that runs elsewhere (empty: the processes start their own)"
    )
    rollout_tensor_parallel: int = free_flag(
        1, "vllm: processes of a host that share a server of theirs, and their GPUs", gt=0
    )
    rollout_memory: float = free_flag(
        0.3, "vllm: share of a device's memory for such a server's weights and cache", gt=0, le=1
    )

    def __post_init__(self) -> None:
        """Refuse values that mean nothing to the engine."""
        super().__post_init__()
        unused, where = ["rollout_tensor_parallel", "rollout_memory"], "with --rollout_server"
        if self.rollout_engine == "own":
            unused, where = ["rollout_server", *unused], "without --rollout_engine vllm"
        elif not self.rollout_server:
            unused = []
        for name in unused:
            if getattr(self, name) != (default := default_of(self, name)):
                raise self.refused(name, f"{default or 'empty'} {where}")
        if self.rollout_engine == "vllm":
            refuse_for_vllm(self)


def default_of(config: EngineConfig, name: str) -> Any:
    """The default of a field."""
    return config.__dataclass_fields__[name].metadata["default"]


def refuse_for_vllm(config: EngineConfig) -> None:
    """Raise a UserError for what vLLM cannot do, or would do otherwise."""
    url, where = urlsplit(config.rollout_server), "with --rollout_engine vllm"
    if config.rollout_server and not (url.scheme in ("http", "https") and url.hostname):
        raise config.refused("rollout_server", "a URL, as http://node7:8000")
    if config.generation_cache_tokens != (default := default_of(config, "generation_cache_tokens")):
        why = "whose cache fills its share of the memory"
        raise config.refused("generation_cache_tokens", f"{default} {where}, {why}")
    temperature = getattr(config, "temperature", 1.0)
    if 0 < temperature < LEAST_TEMPERATURE:
        raise config.refused("temperature", f"at least {LEAST_TEMPERATURE} {where}")
    if is_restricted(config) and temperature != 1:
        why = "vLLM's log-probabilities are then those at 1, or of the restricted distribution"
        raise config.refused("temperature", f"1 {where} and --top_k or --top_p: {why}")


def is_restricted(config: EngineConfig) -> bool:
    """Whether not every token may be drawn."""
    return getattr(config, "top_k", 0) > 0 or getattr(config, "top_p", 1.0) < 1
