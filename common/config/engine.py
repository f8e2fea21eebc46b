"""The flag of a server that samples in place of this project's sampler, and what excludes it."""

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from common.config.flags import ENGINE, free_flag
from common.config.stages import SamplingConfig

LEAST_TEMPERATURE = 0.01  # vLLM takes a lower one for this


@dataclass
class EngineConfig(SamplingConfig):
    """The fields of every stage that samples what it scores."""

    # Of stages without the flag
    temperature = 1.0
    top_k = 0
    top_p = 1.0

    _engine: ClassVar = ENGINE
    rollout_server: str = free_flag("", "URL of a vLLM server (empty: this project's sampler)")

    def __post_init__(self) -> None:
        """Refuse what vLLM cannot do, or would do otherwise."""
        super().__post_init__()
        if not self.rollout_server:
            return
        url, where = urlsplit(self.rollout_server), "with --rollout_server"
        if url.scheme not in ("http", "https") or not url.hostname:
            raise self.refused("rollout_server", "a URL, as http://node7:8000")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise self.refused("temperature", f"at least {LEAST_TEMPERATURE} {where}")
        if is_restricted(self) and self.temperature != 1:
            reason = (
                "vLLM's log-probabilities are then those at 1, or of the restricted distribution"
            )
            raise self.refused("temperature", f"1 {where} and --top_k or --top_p: {reason}")


def is_restricted(config: EngineConfig) -> bool:
    """Whether not every token may be drawn."""
    return config.top_k > 0 or config.top_p < 1
