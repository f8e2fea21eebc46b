"""Gradients reduced in every micro-batch are those reduced once a step; what a rank holds, sends.

Of 8 and of 64 ranks one is run, in one process: the others are only said to be there. About
`common.model.fsdp`.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import SHORT_RUN, launch, local, run_stages, untimed_lines
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import distributed
from common.batch import padded_batch
from common.forward import Policy
from common.model import fsdp, optim
from common.run import Run

FLAGS: dict[str, Any] = SHORT_RUN | {
    "dataset_test_split": "",
    "num_train_rows": 11,  # of the second of two steps 3 rows are there: of 4 ranks one has none
    "max_completion_length": 24,
    "batch_size": 8,
    "micro_batch_size": 1,
    "max_steps": 2,
    "learning_rate": 3e-3,
}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora_r": 4},
    "recomputed": {"gradient_checkpointing": True},
    "offload": {"cpu_offload": True},
    "zero2": {"reshard_after_forward": False},
}
LAYOUTS = {2: 1, 4: 2}  # ranks -> replicas


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, start_flags: dict[str, str]) -> Path:
    """A model's folder, which adapters need."""
    folder = tmp_path_factory.mktemp("base")
    flags = FLAGS | start_flags | {"max_steps": 1, "output_dir": str(folder)}
    launch(run_stages, 1, folder, jobs=[{"stage": "sft", "flags": flags}])
    return folder / "model"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Every setup both ways, on both layouts."""
    folder = tmp_path_factory.mktemp("runs")
    for num_ranks, num_replicas in LAYOUTS.items():
        jobs = [
            {
                "stage": "sft",
                "flags": FLAGS
                | {"model_name_or_path": str(base), "num_replicas": num_replicas}
                | SETUPS[name]
                | {"shard_gradients": x, "output_dir": f"{folder}/{num_ranks}/{name}/{x}"},
            }
            for name in SETUPS
            for x in (True, False)
        ]
        launch(run_stages, num_ranks, folder, jobs=jobs)
    return folder


@pytest.mark.parametrize("num_ranks", LAYOUTS)
@pytest.mark.parametrize("name", SETUPS)
def test_losses_are_the_same(runs: Path, num_ranks: int, name: str) -> None:
    lines = [untimed_lines(runs / f"{num_ranks}/{name}/{shards}") for shards in (True, False)]
    assert len(lines[0]) == FLAGS["max_steps"]
    for sharded, whole in zip(*lines, strict=True):
        assert sharded["grad_norm"] > 0.1
        for metric in ("loss", "grad_norm"):
            assert sharded[metric] == pytest.approx(whole[metric], rel=1e-6)


COLLECTIVES = ("reducescatter", "allreduce", "allgather")
NUM_UNITS = 3  # two blocks and the root


def held_bytes() -> int:
    """Of every tensor that is alive, each storage once. Collective."""
    distributed.barrier()
    time.sleep(0.2)  # until gloo's threads have let go of what they sent
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter, DTensor)
    storages = [local(x).untyped_storage() for x in gc.get_objects() if type(x) in kinds]
    return sum({x._cdata: x.nbytes() for x in storages}.values())


def accumulate_both_ways(num_replicas: int, fake_world: int) -> list[dict[str, Any]]:
    """A step's micro-batches on this rank, which may be one of a fake group."""
    if fake_world:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=fake_world)
    return [accumulate(sharded, num_replicas) for sharded in (True, False)]


def accumulate(sharded: bool, num_replicas: int) -> dict[str, Any]:
    """Bytes held after each micro-batch, and collectives in it; numbers held, and the update's."""
    config = tiny.train_config(shard_gradients=sharded, num_replicas=num_replicas, layout="padded")
    policy = Policy(tiny.causal_lm("llama", width=40))
    shapes = [list(parameter.shape) for parameter in policy.parameters()]
    policy = fsdp.shard(policy, config, distributed.mesh(num_replicas))
    batch = padded_batch([[3, 4, 5]], [[[6, 7]]], 0)
    policy(batch).token_logps.sum().backward()  # makes what stays
    policy.zero_grad()
    run = Run.__new__(Run)  # without a folder
    run.module, run.shards_gradients, run.has_updated = policy, sharded, True
    run.step, run.make_batches = 0, None
    before, held, counts = held_bytes(), [], []
    for micro_batch in run.micro_batches([batch] * 3):
        with CommDebugMode() as communication:
            policy(micro_batch).token_logps.sum().backward()
        held.append(held_bytes() - before)
        collectives = calls(communication).items()
        counts.append([sum(n for call, n in collectives if name in call) for name in COLLECTIVES])
    sizes = {"weights": num_local(policy.parameters())}
    sizes["gradients"] = num_local(parameter.grad for parameter in policy.parameters())
    for parameter in policy.parameters():
        local(parameter.grad).fill_(0.01)  # nobody sent the rest of a fake group
    optimizer = optim.build_optimizer(policy, config)
    with CommDebugMode() as communication:
        optim.clip_and_step(optimizer, config, 0, 1, torch.zeros(()))
    states = (x for state in optimizer.state.values() for x in state.values() if x.dim())
    sizes["moments"] = num_local(states)
    all_bytes = 4 * sum(p.numel() for p in policy.parameters())
    seen = {"held": held, "counts": counts, "all": all_bytes, "shapes": shapes, "sizes": sizes}
    return seen | {"update": calls(communication)}


def num_local(tensors: Iterable[Any]) -> int:
    return sum(local(tensor).numel() for tensor in tensors)


def calls(seen: CommDebugMode) -> Counter[str]:
    """Number of calls of each collective, by its name without underscores."""
    counts: Counter[str] = Counter()
    for operator, count in seen.get_comm_counts().items():
        counts[operator.__name__.replace("_", "")] += count
    return counts


@pytest.mark.parametrize(
    ("num_ranks", "fake_world", "num_replicas"),
    [(2, 0, 1), (4, 0, 2), (1, 8, 1), (1, 64, 1), (1, 64, 8)],
)
def test_a_rank_holds_and_sends_its_shard(tmp_path, num_ranks, fake_world, num_replicas):
    group = {"num_replicas": num_replicas, "fake_world": fake_world}
    sharded, whole = launch(accumulate_both_ways, num_ranks, tmp_path, **group)[0]
    num_shards = (fake_world or num_ranks) // num_replicas
    shard = 0
    for rows, *columns in whole["shapes"]:
        shard += -(-rows // num_shards) * (columns[0] if columns else 1)
    assert whole["held"][:-1] == pytest.approx([whole["all"]] * 2, rel=0.02)
    for held in (*sharded["held"], whole["held"][-1]):
        assert held == pytest.approx(4 * shard, rel=0.03)
    gathers = NUM_UNITS + NUM_UNITS - 1
    once, last = [NUM_UNITS, 0, gathers], [NUM_UNITS, NUM_UNITS * (num_replicas > 1), gathers]
    assert whole["counts"] == [[0, 0, gathers], [0, 0, gathers], last]
    assert sharded["counts"] == [once, once, last]
    if fake_world:  # rank 0, which has the most rows
        for record in (sharded, whole):
            assert record["sizes"] == {"weights": shard, "gradients": shard, "moments": 2 * shard}
            assert record["update"] == {"allreduce": 2}
