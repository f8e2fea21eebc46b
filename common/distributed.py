"""Ranks, devices, meshes and collectives.

Without torchrun a run is a process group of one, so that every stage is written once.
"""

import os
import random
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from common.errors import UserError

_limit = timedelta(minutes=30)  # of a collective; `start` sets it


def start(timeout: float = 1800.0) -> None:
    """Join the process group that torchrun describes, or make a group of one. Idempotent.

    `timeout` is the seconds that this process waits for the others, here and in a collective.
    """
    global _limit
    if dist.is_initialized():
        return
    quieten()
    # With a mask, cuDNN's attention makes a new plan for every shape, and gradients of queries in
    # masked rows may be NaN (github.com/pytorch/pytorch/issues/196678). Other fused kernels stay.
    torch.backends.cuda.enable_cudnn_sdp(False)
    backend = "gloo"
    if torch.cuda.is_available():
        # Micro-batches differ in size, and fragment memory segments of fixed sizes. torch reads
        # this at the first allocation; the user may have configured the allocator.
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        local_rank = number_in("LOCAL_RANK")
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} of this machine has no GPU: there are "
                f"{torch.cuda.device_count()}; lower --nproc_per_node."
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"  # gloo serves offloaded parameters and host-side sums
    _limit = timedelta(seconds=timeout)
    if "RANK" not in os.environ:
        alone = dist.HashStore()  # type: ignore[attr-defined]  # is not re-exported
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=_limit)
        return
    dist.init_process_group(backend, timeout=_limit)


def quieten() -> None:
    """Silence warnings and progress bars of libraries."""
    # A process that a user's function forks would wait for ever for the tokenizer's threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a new reward head is no news


def environment(variable: str) -> str | None:
    """The value of an environment variable, if it is set."""
    return os.environ.get(variable)


def number_in(variable: str, default: int = 0) -> int:
    """An environment variable as a number, the default if it is none."""
    text = environment(variable) or ""
    return int(text) if text.isdecimal() else default


@contextmanager
def tokenizer_threads() -> Iterator[None]:
    """Let the tokenizer use all cores; `quieten` turns its threads off."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before or "false"


def rank() -> int:
    """Rank of this process, also before `start`."""
    return dist.get_rank() if dist.is_initialized() else number_in("RANK")


def world_size() -> int:
    """Number of processes, also before `start`."""
    if dist.is_initialized():
        return dist.get_world_size()
    return number_in("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def is_rank0() -> bool:
    """Whether this is rank 0, which writes files and prints."""
    return rank() == 0


def device() -> torch.device:
    """Device of this process."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed every generator, the same on all ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - libraries read the global generator
    torch.manual_seed(seed)


def refuse_replicas(num_replicas: int, num_ranks: int) -> None:
    """Raise a UserError if the processes do not split into that many equal groups."""
    if num_ranks % num_replicas != 0:
        raise UserError(
            f"--num_replicas is {num_replicas}; it must divide the {num_ranks} processes."
        )


def refuse_uneven(batch_size: int, num_ranks: int) -> None:
    """Raise a UserError if the processes cannot share a batch evenly."""
    if batch_size % num_ranks != 0:
        raise UserError(
            f"--batch_size is {batch_size}, which {num_ranks} processes cannot share evenly; "
            f"make it a multiple of {num_ranks}."
        )


def mesh(num_replicas: int = 1) -> DeviceMesh:
    """The mesh to shard over: 1-D, or (replicate, shard) for HSDP. Collective."""
    refuse_replicas(num_replicas, world_size())
    if num_replicas == 1:
        return init_device_mesh(device().type, (world_size(),), mesh_dim_names=("shard",))
    shape = (num_replicas, world_size() // num_replicas)
    result = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))
    for group in result.get_all_groups():
        _set_pg_timeout(_limit, group)  # else subgroups have torch's default
    return result


def another_group() -> Any:
    """A second group of all processes, on gloo, for a background thread. Collective."""
    return dist.new_group(backend="gloo", timeout=_limit)  # torch's own default is half an hour


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, a new tensor on the same device. Collective."""
    result = tensor.detach().clone()
    dist.all_reduce(result)
    return result


def count_all(counts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum of all counts of all ranks, a float32 scalar on the device. Collective."""
    total = torch.stack(list(counts)).sum().float()
    return all_reduce_sum(total.to(device(), non_blocking=True))


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """Maximum over ranks, a new tensor on the same device. Collective."""
    result = tensor.detach().clone()
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result


def from_rank0(value: Any) -> Any:
    """Rank 0's value on every rank. Collective.

    torch pickles it: ranks trust each other, as processes that one user started. No file is ever
    unpickled.
    """
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all_ranks(values: list[Any]) -> list[Any]:
    """The ranks' lists concatenated, on every rank, pickled as in `from_rank0`. Collective."""
    lists: list[list[Any]] = [values] * world_size()
    if world_size() > 1:
        dist.all_gather_object(lists, values)
    return [value for values in lists for value in values]


@contextmanager
def together() -> Iterator[None]:
    """A UserError of one rank inside is raised on every one, the first's. Collective.

    It may be nested: an error that every rank has raised is not exchanged again.
    """
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        if error.is_on_all_ranks:
            raise
        failure = error
    for first in filter(None, from_all_ranks([failure])):
        first.is_on_all_ranks = True
        raise first


def sum_together(tensor: torch.Tensor) -> torch.Tensor:
    """`all_reduce_sum` for a function inside `together`, which may fail on one rank. Collective."""
    with together():  # no other rank has left the function
        pass
    return all_reduce_sum(tensor)


def barrier() -> None:
    """Wait for every rank. Collective."""
    if world_size() > 1:
        dist.barrier()


def print_rank0(text: object) -> None:
    """`print` on rank 0, flushed; silent elsewhere."""
    if is_rank0():
        print(text, flush=True)


def progress_bar(
    description: str, total: int | None, initial: int = 0, *, unit: str = "step", items: Any = None
) -> Any:
    """A tqdm bar on stderr of rank 0; without a terminal it prints a line every 30 seconds instead.

    A bar with another unit than steps is inside a run: it appears once it takes seconds, and
    disappears at its end. As an iterator it gives and counts the `items`.
    """
    from tqdm import tqdm

    def write_line(text: str) -> None:
        if text := text.strip("\r\n "):
            sys.stderr.write(text + "\n")

    interactive = sys.stderr.isatty()
    lines: Any = SimpleNamespace(write=write_line, flush=sys.stderr.flush)  # nothing is redrawn
    return tqdm(
        iterable=items,
        total=total,
        initial=initial,
        desc=description,
        unit=f" {unit}",
        file=sys.stderr if interactive else lines,
        dynamic_ncols=interactive,
        ascii=None if interactive else True,
        miniters=0,  # also for a part of a completion
        mininterval=0.2 if interactive else 30.0,
        delay=(0.0 if unit == "step" and items is None else 2.0) if interactive else 30.0,
        smoothing=0.1,
        unit_scale=unit in ("row", "completion"),
        leave=unit == "step",
        disable=not is_rank0(),
    )


def device_memory() -> int:
    """Bytes of the smallest GPU of the run, 0 on CPUs. Collective."""
    mine = torch.cuda.get_device_properties(device()).total_memory if device().type == "cuda" else 0
    return -int(all_reduce_max(torch.tensor(-mine)))


def peak_resident_gb() -> float:
    """Peak host memory of this process so far, in GB."""
    scale = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


def process_peak_gb() -> float:
    """Peak memory of this process so far, in GB, of its GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    return torch.cuda.max_memory_allocated() / 1e9 if has_gpu else peak_resident_gb()


def peak_memory_gb() -> float:
    """Peak memory of any process so far, in GB, of the GPU if there is one. Collective."""
    return float(all_reduce_max(torch.tensor(process_peak_gb(), dtype=torch.float64)))
