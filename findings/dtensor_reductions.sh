#!/usr/bin/env bash
# torch 2.13.0: `.item()` of a reduced DTensor is the number of this rank's shard.
#
# Expected: sum, mean and max of a sharded gradient give the number of the whole tensor on every rank,
#   or raise an error, because `clip_grad_norm_` over the same gradients returns the whole norm.
# Seen: each rank reads another number. The sum is a DTensor with the placement Partial, and `.item()`,
#   `float()`, `bool()` and comparisons read the local part without a word. `full_tensor()` is right.
# Why it matters: a log line such as `grad.pow(2).sum().item()` is wrong by the number of ranks, and
#   `if grad.isnan().any(): skip the step` takes another branch on each rank: the next collective hangs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = torch.distributed.init_device_mesh("cpu", (2,))
sharded = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, float("nan")]), mesh, [Shard(0)])
first = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)])
seen = [first.sum().item(), first.mean().item(), first.max().item(), bool(sharded.isnan().any())]
right = [first.sum().full_tensor().item(), bool(sharded.isnan().any().full_tensor())]
parameter = torch.nn.Parameter(first)
parameter.grad = first.clone()
norm = float(torch.nn.utils.clip_grad_norm_([parameter], 1e9))
for rank in range(2):
    dist.barrier()
    if rank == dist.get_rank():
        print(f"rank {rank}: {seen}; full_tensor: {right}; norm squared: {norm**2:.0f}", flush=True)
PY
OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc_per_node 2 probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
rank 0: [3.0, 1.5, 2.0, False]; full_tensor: [10.0, True]; norm squared: 30
rank 1: [7.0, 3.5, 4.0, True]; full_tensor: [10.0, True]; norm squared: 30
SEEN
