"""A policy's weights on their way to vLLM, from shards, without a whole copy on any rank.

A rank that leads sends them, while the others gather every parameter with it. From a CPU they go in
the bodies of requests; from a GPU by vLLM's own transports, which no test runs.
"""

import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from common import distributed
from common.errors import EngineError
from common.model import fsdp, lora, replica
from common.sampling.engine_config import EngineConfig
from common.sampling.server import EXTENSION, Server
from common.sampling.vllm_worker import Part, packed

PART_BYTES = 2**26  # of weights in one request, or one buffer, but for a larger parameter
Send = Callable[[], None]


class Parameter(NamedTuple):
    """What vLLM is told of one before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """Whole parameters by the names of the plain model, gathered one by one, adapters merged.

    They are gone through in passes. For vLLM this is a `WeightSource`.
    """

    def __init__(self, policy: Any, dtype: torch.dtype) -> None:
        """Gather nothing yet. `policy.lm` is the Hugging Face model."""
        self.policy, self.lm, self.dtype = policy, policy.lm, dtype
        self.vocabulary: int = self.lm.get_input_embeddings().weight.shape[0]
        self.passing: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> list[Parameter]:
        """What a pass goes through, in order."""
        named = ((lora.plain_name(name), p) for name, p in self.lm.named_parameters())
        return [
            Parameter(name, self.dtype, tuple(p.shape)) for name, p in named if ".lora_" not in name
        ]

    def start(self) -> None:
        """Begin a pass. Collective."""
        fsdp.reshard(self.policy)
        whole = replica.whole_weights(self.lm)
        self.passing = ((one.name, whole(one.name, one.dtype)) for one in self.metadata())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The rest of the pass. Collective, each of them."""
        return self.passing

    def finish(self) -> None:
        """Go through the rest with the other ranks. Collective."""
        for _ in self.passing:
            pass


def sender(server: Server, weights: Weights, config: EngineConfig, *, leads: bool) -> Send:
    """What sends a server the weights of a pass; for every rank to call. Collective.

    Raises:
        EngineError: the server was started for no transport that there is from here.
    """
    is_own, on_gpu = not config.rollout_server, distributed.device().type == "cuda"
    backend = server.setting("weight_transfer_config", "backend")
    if server.setting("parallel_config", "worker_extension_cls") == EXTENSION:
        return partial(send_in_requests, server, weights) if leads else weights.finish
    if not on_gpu or backend != ("ipc" if is_own else "nccl"):
        raise server.error(
            f"has --weight-transfer-config {backend!r}; from a GPU it must be 'nccl', and from a "
            f"CPU the server needs --worker-extension-cls {EXTENSION}"
        )
    return gpu_sender(server, weights, is_own, leads) if is_own or leads else weights.finish


def send_in_requests(server: Server, weights: Weights) -> None:
    """Send the weights in the bodies of requests."""
    parts: list[Part] = []
    size = 0
    server.start_weight_update()
    for name, weight in weights:
        parts.append(packed(name, weight))
        size += weight.nbytes
        if size >= PART_BYTES:
            server.run_on_workers("load_parts", parts=parts)
            parts, size = [], 0
    server.run_on_workers("load_parts", parts=parts)
    server.call("/finish_weight_update")
    server.run_on_workers("pack_heads")


def gpu_sender(server: Server, weights: Weights, is_own: bool, leads: bool) -> Send:
    """The transports of vLLM: memory of a GPU that both sides open, or NCCL. Collective.

    Of the first every rank that leads is a sender; a server takes what its own GPUs hold out of
    what all ranks offer: so a rank whose server fails goes on offering, and raises at the end.
    """
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    failures: list[EngineError] = []

    class Client(HTTPVLLMWeightSyncClient):
        def start_weight_update(self) -> None:
            attempt(server.start_weight_update, failures, is_own)

        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            attempt(partial(server.call, f"/{path}", json), failures, is_own)

    largest = max(math.prod(one.shape) * one.dtype.itemsize for one in weights.metadata())
    info: Any = IPCTrainerInitInfo(
        rank=0 if leads else 1, packed=True, packed_buffer_size_bytes=max(PART_BYTES, largest)
    )
    if not is_own:
        info = NCCLTrainerInitInfo(*meeting_place(server), rank=0)
    client = Client(server.address, server.timeout)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=weights)
    if failures:
        raise failures.pop()

    def send() -> None:
        with distributed.shareable_segments():
            engine.send_weights()
        if failures:
            raise failures.pop()

    return send


def attempt(call: Callable[[], object], failures: list[EngineError], is_kept: bool) -> None:
    """Make a call unless an earlier one has failed; a failure is kept, or raised."""
    try:
        if not failures:
            call()
    except EngineError as error:
        if not is_kept:
            raise
        failures.append(error)


def meeting_place(server: Server) -> tuple[str, int, int]:
    """Address of this machine, as the server sees it, a free port, and how many meet there."""
    workers = server.get("/get_world_size", "world_size")
    url = urlsplit(server.address)
    with socket.create_connection((url.hostname, url.port or 80), server.timeout) as there:
        address = there.getsockname()[0]
    with socket.create_server((address, 0)) as free:
        return address, free.getsockname()[1], 1 + workers
