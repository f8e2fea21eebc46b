#!/usr/bin/env bash
# prodigyopt 1.1.2, torch 2.13.0: under FSDP2 each rank has a learning rate of its own.
#
# Expected: Prodigy's estimate `d`, by which each update is multiplied, comes from sums over all weights, so it
#   is the same on both ranks, and that of one process; or the optimiser refuses sharded parameters.
# Seen: each rank reads the sum over its shards. With the same data on both ranks the estimates part and the
#   loss is another one than without sharding, without a warning. Without sharding the ranks agree.
# Why it matters: parts of one matrix train at different rates, so the number of GPUs changes the run, and a
#   checkpoint has the `d` of the rank that wrote it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 prodigyopt==1.1.2 numpy==2.4.6
cat > probe.py <<'PY'
import torch
import torch.distributed as dist
from prodigyopt import Prodigy
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(1)
inputs = torch.randn(64, 4)
targets = inputs @ torch.randn(4, 4)


def trained(shard):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    if shard:
        fully_shard(model)
    optimizer = Prodigy(model.parameters(), lr=1.0)
    for _ in range(30):
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
    return float(optimizer.param_groups[0]["d"]), loss.item()


for shard in (False, True):
    ranks = [None, None]
    dist.all_gather_object(ranks, trained(shard))
    if dist.get_rank() == 0:
        estimates, losses = zip(*ranks)
        print(f"sharded {shard}: d {', '.join(f'{d:.1f}' for d in estimates)}; "
              f"loss {', '.join(f'{loss:.1f}' for loss in losses)}")
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc_per_node 2 probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
sharded False: d 0.4, 0.4; loss 0.6, 0.6
sharded True: d 0.5, 0.4; loss 0.8, 0.8
SEEN
