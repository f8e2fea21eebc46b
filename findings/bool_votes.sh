#!/usr/bin/env bash
# torch 2.13.0, gloo: summed over ranks, the booleans of 256 ranks that all say True are False.
#
# Expected: an error, since booleans have no sum, or a logical or, whose bytes stay 0 and 1.
# Seen: bytes are added up. `tolist()`, `sum()` and `==` read any byte but 0 as True, so that a vote of
#   a few ranks looks right; at 256 votes the byte is 0 again. Here two ranks add up eight times in a
#   row, which doubles the byte each time; the ninth line is what 256 ranks would get at once.
# Why it matters: `all_reduce(loss.isnan())`, to ask whether any rank has a bad loss, is answered with
#   no where every one of 256 ranks has one. Cast to a number first, or use `ReduceOp.MAX`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
votes = torch.tensor([True, False])
print_here = print if dist.get_rank() == 0 else lambda *_: None
for votes_counted in (2**power for power in range(9)):
    print_here(votes_counted, votes.tolist(), votes.view(torch.uint8).tolist())
    dist.all_reduce(votes)
most = torch.tensor([True, False])
dist.all_reduce(most, dist.ReduceOp.MAX)
print_here("MAX", most.tolist(), most.view(torch.uint8).tolist())
PY
OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc_per_node 2 probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
1 [True, False] [1, 0]
2 [True, False] [2, 0]
4 [True, False] [4, 0]
8 [True, False] [8, 0]
16 [True, False] [16, 0]
32 [True, False] [32, 0]
64 [True, False] [64, 0]
128 [True, False] [128, 0]
256 [False, False] [0, 0]
MAX [True, False] [1, 0]
SEEN
