"""Processes and devices: the only module that reads the environment, and the only entry point.

Without torchrun a run is a process group of one, so that every stage is written once.
"""

import errno
import os
import random
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common import paths
from common.config import CommonConfig, UserError, parse

Config = TypeVar("Config", bound=CommonConfig)
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # ranks wait while rank 0 downloads and reads a model
REFUSED_ALONE_AFTER = 5.0  # seconds; torchrun looks at its processes ten times a second
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a full disk, a quota, a read-only one


def run(main: Callable[[Config], Any], config_class: type[Config]) -> None:
    """Run a stage with the config that the command line gives.

    Exits with status 2 and one sentence for what the user can put right, with 1 for a failure. What
    it writes is never writable for everybody: who changes a model changes what others run.
    """
    os.umask(os.umask(0o077) | 0o002)  # the mask can only be read by setting it
    try:
        config = parse(config_class)
        start()
        refuse_without_gpu(config)
        if is_rank0():  # the others may be on machines where nothing is written
            paths.refuse_unwritable("output_dir", config.output_dir)
        main(config)
        dist.barrier()
    except Exception as error:
        sentence = what_to_put_right(error)
        if not sentence:
            fail()
        if os.environ.get("RANK", "0") != "0":
            # Rank 0 speaks for all, and torchrun then ends this process: unless only this rank was
            # refused, as by a file that is missing on one machine.
            time.sleep(REFUSED_ALONE_AFTER)
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        close_and_exit(2)
    dist.destroy_process_group()


def what_to_put_right(error: Exception) -> str:
    """The sentence for the user; empty for what is none of theirs to put right."""
    if isinstance(error, UserError):
        return str(error)
    code = getattr(error, "errno", None)
    stated = re.search(r"\(os error (\d+)\)", str(error))  # as safetensors gives it
    code = int(stated[1]) if stated and code is None else code
    if code not in NO_ROOM:
        return ""
    file = getattr(error, "filename", None) or "a file of the run"
    return (
        f"{file} cannot be written: {os.strerror(code)}; make room, or name another --output_dir."
    )


def fail() -> NoReturn:
    """End with the traceback of the exception that is handled."""
    # Printed at once: a peer waiting in a collective would hide it under its own timeout.
    print(f"rank {rank()} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    close_and_exit(1)


def refuse_without_gpu(config: CommonConfig) -> None:
    """Raise a UserError for what no CPU can do, before anything is loaded."""
    if config.cuda_graphs and device().type == "cpu":
        raise UserError("--cuda_graphs true needs a GPU, and there is none.")


def close_and_exit(status: int) -> NoReturn:
    """Leave at once, without waiting for peers that may be inside a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start() -> None:
    """Join the process group that torchrun describes, or make a group of one. Idempotent."""
    if dist.is_initialized():
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning at each fork
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a new reward head is no news
    backend = "gloo"
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} of this machine has no GPU: there are "
                f"{torch.cuda.device_count()}; lower --nproc_per_node."
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"  # gloo serves offloaded parameters and host-side sums
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # exists, is not re-exported
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def rank() -> int:
    """This process's number, 0 before `start`."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 before `start`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank0() -> bool:
    """Whether this process writes files and prints."""
    return rank() == 0


def device() -> torch.device:
    """Where this process computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed every generator, the same on all ranks: whatever is drawn is drawn alike."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - libraries below us read the global generator
    torch.manual_seed(seed)


def mesh(num_replicas: int = 1) -> DeviceMesh:
    """The mesh to shard over: 1-D, or (replicate, shard) for HSDP. Collective.

    Raises:
        UserError: the processes do not split into `num_replicas` equal groups.
    """
    if world_size() % num_replicas != 0:
        raise UserError(
            f"--num_replicas is {num_replicas}; it must divide the {world_size()} processes."
        )
    if num_replicas == 1:
        return init_device_mesh(device().type, (world_size(),), mesh_dim_names=("shard",))
    shape = (num_replicas, world_size() // num_replicas)
    return init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, returned as a new tensor on the same device. Collective."""
    result = tensor.detach().clone()
    dist.all_reduce(result)
    return result


def count_all(counts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum of this rank's counts over all ranks, a float32 scalar on the device. Collective."""
    local = torch.stack(list(counts)).sum().to(device())
    return all_reduce_sum(local.float())


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """Largest over ranks, returned as a new tensor on the same device. Collective."""
    result = tensor.detach().clone()
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result


def from_rank0(value: Any) -> Any:
    """Rank 0's value on every rank. Collective.

    torch pickles it on the way: ranks trust each other, as processes of one run that one user
    started. What comes out of a file is never unpickled.
    """
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all_ranks(values: list[Any]) -> list[Any]:
    """The ranks' lists one after another on every rank, pickled as in `from_rank0`. Collective."""
    lists: list[list[Any]] = [values] * world_size()
    if world_size() > 1:
        dist.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def barrier() -> None:
    """Wait for every rank. Collective."""
    dist.barrier()


def print_rank0(*values: object, **options: Any) -> None:
    """`print` on rank 0, flushed; silent elsewhere."""
    if is_rank0():
        print(*values, flush=True, **options)


def local_peak_memory_gb() -> float:
    """Largest memory of this process so far, in GB: of the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    scale = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


def peak_memory_gb() -> float:
    """Largest memory of any process so far, in GB: of the GPU if there is one. Collective."""
    return float(all_reduce_max(torch.tensor(local_peak_memory_gb(), dtype=torch.float64)))
