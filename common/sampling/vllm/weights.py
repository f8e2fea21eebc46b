"""A policy's weights on their way to vLLM, from shards, without a whole copy on any rank.

Rank 0 sends them, while the others gather every parameter with it. To a server on CPUs they go in
the bodies of requests; from a GPU to others by vLLM's NCCL transport, which no test runs.
"""

import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from common import distributed
from common.model import fsdp, lora, rollout_copy
from common.sampling.vllm.server import Server
from common.sampling.vllm.worker import PackedWeight, WeightsInRequests, packed

EXTENSION = f"{WeightsInRequests.__module__}.{WeightsInRequests.__name__}"
REQUEST_BYTES = 2**26  # of weights in one request, but for a larger parameter


class Parameter(NamedTuple):
    """The description of a parameter that vLLM gets before its values."""

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
        self.passing: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> list[Parameter]:
        """Name, type and shape of the parameters of a pass, in order."""
        named = ((lora.plain_name(name), p) for name, p in self.lm.named_parameters())
        return [
            Parameter(name, self.dtype, tuple(p.shape)) for name, p in named if ".lora_" not in name
        ]

    def start(self) -> None:
        """Begin a pass. Collective."""
        fsdp.reshard(self.policy)
        whole = rollout_copy.whole_weights(self.lm)
        self.passing = ((one.name, whole(one.name, one.dtype)) for one in self.metadata())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of the pass that are left. Collective, each of them."""
        return self.passing

    def finish(self) -> None:
        """Go through those that are left with the other ranks. Collective."""
        for _ in self.passing:
            pass


def sender(server: Server, weights: Weights) -> Callable[[], None]:
    """The call that sends a server the weights of a pass, for one rank.

    An EngineError if it was started for no transport that there is from here.
    """
    backend = (server.setting("weight_transfer_config") or {}).get("backend")
    if server.setting("parallel_config.worker_extension_cls") == EXTENSION:
        return partial(send_in_requests, server, weights)
    if backend != "nccl" or distributed.device().type != "cuda":
        raise server.error(
            f"has --weight-transfer-config {backend!r}; from a GPU it must be 'nccl', and from a "
            f"CPU the server needs --worker-extension-cls {EXTENSION}"
        )
    return nccl_sender(server, weights)


def send_in_requests(server: Server, weights: Weights) -> None:
    """Send the weights in the bodies of requests."""
    of_request: list[PackedWeight] = []
    size = 0
    server.start_weight_update()
    for name, weight in weights:
        of_request.append(packed(name, weight))
        size += weight.nbytes
        if size >= REQUEST_BYTES:
            server.run_on_workers("load_packed", weights=of_request)
            of_request, size = [], 0
    server.run_on_workers("load_packed", weights=of_request)
    server.call("/finish_weight_update")
    server.run_on_workers("pack_heads")


def nccl_sender(server: Server, weights: Weights) -> Callable[[], None]:
    """The call of vLLM's NCCL transport, which the server has joined."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Client(HTTPVLLMWeightSyncClient):
        def start_weight_update(self) -> None:
            server.start_weight_update()

        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            server.call(f"/{path}", json)

    client = Client(server.address, server.timeout)
    info = NCCLTrainerInitInfo(*meeting_place(server), rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=weights)
    send: Callable[[], None] = engine.send_weights
    return send


def meeting_place(server: Server) -> tuple[str, int, int]:
    """Address of this machine, as the server sees it, a free port, and how many meet there."""
    num_workers = server.get("/get_world_size", "world_size")
    url = urlsplit(server.address)
    with socket.create_connection((url.hostname, url.port or 80), server.timeout) as there:
        address = there.getsockname()[0]
    with socket.create_server((address, 0)) as free:
        return address, free.getsockname()[1], 1 + num_workers
