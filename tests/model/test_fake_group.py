"""What one of 8 or 64 ranks holds and sends, in one process: the others are only said to be there.

- Its shard is the rows of every parameter that its group gives it, filled up to whole rows; so are
  the gradients that it is left with, and each of the optimiser's two moments.
- A micro-batch gathers each unit's weights once, and those of each block once more in backward.
- An update sums two numbers over the ranks, however many parameters there are: the squared norm of
  the gradients, and how many losses are not finite.

Gradients that are reduced once or in every micro-batch are in `test_shard_gradients`.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import launch, local
from torch import distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import distributed
from common.forward import Policy
from common.model import fsdp, optim
from common.padding import padded_batch
from common.run import Run

NUM_BLOCKS, MICRO_BATCHES = 2, 3
GROUPS = [(8, 1), (64, 1), (64, 8)]  # ranks and replicas


def take_a_step(world_size: int, num_replicas: int) -> dict[str, Any]:
    """Numbers that a rank of such a group holds, and collectives that it calls."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    config = tiny.train_config(num_replicas=num_replicas, layout="padded")
    policy = Policy(tiny.causal_lm("gpt2", n_layer=NUM_BLOCKS, width=40))
    shapes = [list(parameter.shape) for parameter in policy.parameters()]
    policy = fsdp.shard(policy, config, distributed.mesh(num_replicas))
    optimizer = optim.build_optimizer(policy, config)
    run = Run.__new__(Run)  # without a folder
    run.module, run.shards_gradients = policy, False
    gathers = []
    batch = padded_batch([[3, 4, 5]], [[[6, 7]]], 0)
    for part in run.micro_batches([batch] * MICRO_BATCHES, may_stop=False):
        with CommDebugMode() as seen:
            policy(part).token_logps.sum().backward()
        gathers.append(calls(seen).get("allgatherbase"))
    held = {"weights": list(policy.parameters())}
    held["gradients"] = [parameter.grad for parameter in held["weights"]]
    sizes = {name: sum(local(x).numel() for x in tensors) for name, tensors in held.items()}
    for gradient in held["gradients"]:
        local(gradient).fill_(0.01)  # nobody sent the rest
    with CommDebugMode() as seen:
        optim.clip_and_step(policy, optimizer, config, 0, 1, torch.zeros(()))
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    sizes["moments"] = sum(local(x).numel() for x in states)
    return {"shapes": shapes, "sizes": sizes, "gathers": gathers, "update": calls(seen)}


def calls(seen: CommDebugMode) -> dict[str, int]:
    """How often each collective was called, by its name without underscores."""
    found: Counter[str] = Counter()
    for operator, count in seen.get_comm_counts().items():
        found[operator.__name__.replace("_", "")] += count
    return dict(found)


@pytest.mark.parametrize(("num_ranks", "num_replicas"), GROUPS)
def test_what_a_rank_holds_and_sends(tmp_path: Path, num_ranks: int, num_replicas: int) -> None:
    group = {"world_size": num_ranks, "num_replicas": num_replicas}
    (seen,) = launch(take_a_step, 1, tmp_path, **group)
    num_shards = num_ranks // num_replicas
    shard = 0
    for rows, *columns in seen["shapes"]:
        shard += -(-rows // num_shards) * (columns[0] if columns else 1)
    assert seen["sizes"] == {"weights": shard, "gradients": shard, "moments": 2 * shard}
    assert seen["gathers"] == [NUM_BLOCKS + 1 + NUM_BLOCKS] * MICRO_BATCHES
    assert seen["update"] == {"allreduce": 2}
