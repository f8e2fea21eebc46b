#!/usr/bin/env bash
# torch 2.13.0, CPU: of completions with equal rewards argsort and sort give the first ones in a group of
# 16, and some from the middle in a group of 17; topk does so in smaller groups too.
#
# Expected: ties come in the order of their places on a CPU, whatever the size of the group, also where
#   `stable=True` is left out.
# Seen: up to 16 elements sort and argsort keep the order, for every dtype, with AVX512, AVX2 and plain
#   kernels alike; from 17 on they do not. topk(1) of eight equal numbers is the seventh. argmax is the
#   first. So a test with small groups sees nothing.
# Why it matters: rewards of 0 and 1 tie. Best of n by topk and by argmax are two policies, and a choice
#   that rests on the places of samples ("the earlier one wins") changes when a group grows from 16 to
#   32. `sort(stable=True)` keeps the order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch

for group in (4, 16, 17, 64):
    rewards = torch.zeros(2, group)
    rewards[:, 1::2] = 1.0  # every second answer is right
    right = [*range(1, group, 2)]
    first = {
        "argsort": rewards.argsort(dim=1, descending=True)[0, : len(right)].tolist() == right,
        "stable": rewards.argsort(dim=1, descending=True, stable=True)[0, : len(right)].tolist() == right,
        "topk": rewards.topk(2, dim=1).indices[0].tolist() == right[:2],
        "argmax": int(rewards.argmax(dim=1)[0]) == right[0],
    }
    print(group, *(f"{name} {'in order' if kept else 'reordered'}," for name, kept in first.items()))
alike = []
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
    sizes = [n for n in range(2, 200) if torch.zeros(n, dtype=dtype).argsort().tolist() != [*range(n)]]
    alike.append((sizes[0], len(sizes)))
print("topk(1) of eight equal numbers:", int(torch.zeros(8).topk(1).indices))
print("first size that is reordered, and how many below 200, by dtype:", *alike)
PY
OMP_NUM_THREADS=1 venv/bin/python probe.py > seen
cat seen
diff - seen <<'SEEN'
4 argsort in order, stable in order, topk in order, argmax in order,
16 argsort in order, stable in order, topk reordered, argmax in order,
17 argsort reordered, stable in order, topk reordered, argmax in order,
64 argsort reordered, stable in order, topk reordered, argmax in order,
topk(1) of eight equal numbers: 6
first size that is reordered, and how many below 200, by dtype: (17, 183) (17, 183) (17, 183) (17, 183) (17, 183)
SEEN
