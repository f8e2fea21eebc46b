"""A vLLM server that the user has started: its HTTP calls."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from common.config.engine import EngineConfig, is_restricted
from common.errors import EngineError, first_sentence, gist


class Server:
    """A vLLM server at an address; every failure is an EngineError that names the address."""

    def __init__(self, address: str, ddp_timeout: float) -> None:
        """Take the server's URL, and the seconds that ranks wait for each other.

        A call waits for half as long, so that the other ranks still get its error.
        """
        self.address, self.timeout = address, ddp_timeout / 2

    def call(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        """Send a request and read the answer, JSON; an EngineError if it fails or is none."""
        url = urlsplit(self.address)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        connection = kinds[url.scheme](url.netloc, timeout=self.timeout)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request(method, url.path.rstrip("/") + path, json.dumps(body or {}), headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.error(f"does not answer {path}: {gist(error)}") from None
        finally:
            connection.close()
        if answer.status != http.client.OK:
            reason = first_sentence(text[:2000].decode(errors="replace")) or answer.reason
            raise self.error(f"answers {path} with status {answer.status}: {reason}")
        try:
            return json.loads(text) if text else None
        except ValueError:  # a proxy's page, with status 200
            raise self.error(f"answers {path} with {text[:40]!r}, which is no JSON") from None

    def error(self, fault: str) -> EngineError:
        """The error of a fault, which a verb begins: "does not answer"."""
        return EngineError(f"the vLLM server {self.address} {fault}.")

    def get(self, path: str, key: str) -> Any:
        """The value of a key in the answer to a GET request; a dot in it leads one level down."""
        value = self.call(path, method="GET")
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise self.error(f"answers {path} without {name}")
            value = value[name]
        return value

    def setting(self, name: str) -> Any:
        """A value of vLLM's configuration, as `model_config.max_model_len`."""
        return self.get("/server_info?config_format=json", f"vllm_config.{name}")

    def run_on_workers(self, method: str, **arguments: Any) -> None:
        """Call a method of `worker.WeightsInRequests`."""
        self.call("/collective_rpc", {"method": method, "kwargs": arguments})

    def start_weight_update(self) -> None:
        """Begin to take weights, also after a run that ended while it sent some."""
        try:
            self.call("/start_weight_update")
        except EngineError:
            self.call("/finish_weight_update")
            self.call("/start_weight_update")

    def check(self, config: EngineConfig) -> None:
        """Raise an EngineError if it gives other log-probabilities, or cuts completions."""
        mode = self.setting("model_config.logprobs_mode")
        if mode != logprobs_mode(config):
            raise self.error(f"has --logprobs-mode {mode}; it must be {logprobs_mode(config)}")
        longest = config.max_prompt_length + config.max_completion_length
        if (length := self.setting("model_config.max_model_len")) < longest:
            raise self.error(f"has --max-model-len {length}; it must be {longest}")


def logprobs_mode(config: EngineConfig) -> str:
    """Where vLLM takes log-probabilities at the temperature, before restricting.

    The processed ones are divided by the temperature, and restricted; the raw ones neither.
    """
    return "raw_logprobs" if is_restricted(config) else "processed_logprobs"
