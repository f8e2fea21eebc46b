"""Run a function on several ranks, and stages on them: the parent's side and the child's.

`launch` starts torchrun on this file; every rank then calls the function that was named and hands
back what it returned. `run_stages` is such a function: it runs the scripts' own `main`, one after
another in one process group (importing torch costs more than fifty steps of a tiny model).
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common import checkpoint, distributed, fsdp, optim, plots
from common.config import parse

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "sft": ("train_sft", "SFTConfig"),
    "reward": ("train_reward", "RewardConfig"),
    "dpo": ("train_dpo", "DPOConfig"),
    "grpo": ("train_grpo", "GRPOConfig"),
}
Job = dict[str, Any]  # "stage", and "flags" without their dashes, and "watch"


def launch(function: Callable[..., Any], num_ranks: int, folder: Path, **arguments: Any) -> list:
    """What `function(**arguments)` returns on each of `num_ranks` CPU processes, by rank.

    Args:
        function: at the top of a module in tests/; its arguments and its result must fit in JSON.
        num_ranks: processes started by torchrun.
        folder: existing, for the files between parent and children.
        arguments: for the function, the same on every rank.
    """
    call = {"module": function.__module__, "name": function.__name__, "arguments": arguments}
    call_file = folder / f"call_{len(list(folder.glob('call_*.json')))}.json"
    call_file.write_text(json.dumps(call))
    run_torchrun([__file__, str(call_file)], num_ranks)
    return [json.loads(result_file(call_file, rank).read_text()) for rank in range(num_ranks)]


def run_torchrun(command: Sequence[str], num_ranks: int, *, timeout: float = 300) -> str:
    """Run a script and its arguments under torchrun on the CPU; its output, if it succeeds."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, "--nproc_per_node", str(num_ranks), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-6000:]}"
    return result.stdout


def result_file(call_file: Path, rank: int) -> Path:
    """Where a rank leaves what the function returned."""
    return call_file.with_name(f"{call_file.stem}_rank_{rank}.json")


def answer(call_file: Path) -> None:
    """The child's side of `launch`."""
    call = json.loads(call_file.read_text())
    distributed.start()
    function = getattr(importlib.import_module(call["module"]), call["name"])
    result = function(**call["arguments"])
    result_file(call_file, distributed.rank()).write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_stages(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run each job's stage on this rank, in order; returns what was seen inside it, if watched."""
    records = []
    for job in jobs:
        module_name, config_name = STAGES[job["stage"]]
        module = importlib.import_module(module_name)
        arguments = [text for key, value in job["flags"].items() for text in flag(key, value)]
        config = parse(getattr(module, config_name), arguments)
        record: dict[str, Any] = {}
        # Pictures have their own tests, and take longer than the steps that are drawn.
        with mock.patch.object(plots, "plot_run"), watched(record if job.get("watch") else None):
            module.main(config)
        records.append(record)
    return records


def flag(key: str, value: Any) -> list[str]:
    """A config field as command-line arguments."""
    return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]


@contextmanager
def watched(record: dict[str, Any] | None) -> Iterator[None]:
    """Note what a stage does on this rank: devices before sharding, dtypes, state after training.

    The functions that the stage calls still run; None notes nothing.
    """
    if record is None:
        yield
        return
    shard, clip_and_step, export = fsdp.shard, optim.clip_and_step, checkpoint.export
    record |= {"devices": [], "forwards": 0}

    def count_forward(*_: Any) -> None:
        record["forwards"] += 1

    def note_devices(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        record["devices"].append(sorted({p.device.type for p in module.parameters()}))
        if len(record["devices"]) == 1:  # the model that is trained
            fsdp.blocks(module)[0].register_forward_pre_hook(count_forward)
        return shard(module, *args, **kwargs)

    def note_dtypes(module: nn.Module, optimizer: Any, *args: Any) -> dict[str, Any]:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        result = clip_and_step(module, optimizer, *args)
        states = [v for state in optimizer.state.values() for v in state.values()]
        record["gradient_dtypes"] = names(t.dtype for t in gradients)
        record["parameter_dtypes"] = names(p.dtype for p in module.parameters())
        record["optimizer_dtypes"] = names(t.dtype for t in states)
        record["num_local"] = sum(local(p).numel() for p in module.parameters())
        record["num_total"] = sum(p.numel() for p in module.parameters())
        return result

    def note_state(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        record["state"] = state_hashes(module)
        export(module, *args, **kwargs)

    with (
        mock.patch.object(fsdp, "shard", note_devices),
        mock.patch.object(optim, "clip_and_step", note_dtypes),
        mock.patch.object(checkpoint, "export", note_state),
    ):
        yield


def names(dtypes: Any) -> list[str]:
    """Dtypes as sorted distinct names."""
    return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from this rank's replica; plain tensors as they are. Collective.

    A parameter that escaped sharding is not gathered: it would show as a difference between ranks.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_hashes(module: nn.Module) -> dict[str, str]:
    """A hash of every parameter's and buffer's bits as this rank sees them. Collective."""
    fsdp.reshard(module)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: hash_of(whole(tensor.detach())) for name, tensor in tensors.items()}


def hash_of(tensor: torch.Tensor) -> str:
    """Hash of a tensor's shape, dtype and bits."""
    data = tensor.cpu().contiguous()
    head = f"{tuple(data.shape)} {data.dtype} ".encode()
    return hashlib.sha256(head + data.view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
