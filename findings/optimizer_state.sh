#!/usr/bin/env bash
# torch 2.13.0: reading the state of a new AdamW makes its first update a quarter smaller.
#
# Expected: `get_optimizer_state_dict` and `get_state_dict` only read; before the first step the state is
#   empty, or zeros and step 0.
# Seen: a new optimiser is stepped once with zero gradients and learning rate 0, and keeps step 1. The
#   first real update then corrects its averages for two steps: it is 0.744 of the learning rate where it
#   should be 1, the second 0.858, and the hundredth is still another one.
# Why it matters: this call is the usual way to make the containers that a checkpoint is loaded into, and
#   to save at step 0. A run that saves before its first step is another run than one that does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

updates = {}
for read in (False, True):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    if read:
        state = get_optimizer_state_dict(model, optimizer)["state"]["weight"]
        print("state of a new optimiser:", {name: value.item() for name, value in state.items()})
    updates[read] = []
    for _ in range(100):
        before = model.weight.item()
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        updates[read].append(before - model.weight.item())
for step in (1, 2, 10, 100):
    print(f"step {step}: update {updates[False][step - 1]:.3f}, after reading {updates[True][step - 1]:.3f}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
state of a new optimiser: {'step': 1.0, 'exp_avg': 0.0, 'exp_avg_sq': 0.0}
step 1: update 1.000, after reading 0.744
step 2: update 1.000, after reading 0.858
step 10: update 1.000, after reading 0.995
step 100: update 1.000, after reading 1.005
SEEN
