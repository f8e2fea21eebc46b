#!/usr/bin/env bash
# torch 2.13.0: inside one autocast block every forward uses the weights of the first, also if it is off.
#
# Expected: a forward after `optimizer.step()` uses the new weights, wherever the block begins.
# Seen: autocast keeps the bfloat16 copies of all weights that need a gradient until the outermost block
#   ends. With a block around the loop the output never changes while the float32 weight moves at each
#   step. A block around it with `enabled=False`, and one block in the loop, behave the same. With the
#   block in the loop alone, or with `cache_enabled=False`, the output follows.
# Why it matters: a loop that samples, trains and evaluates in one block has the gradients of its first
#   policy for ever, and looks like a learning rate that is too small.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
from contextlib import nullcontext

import torch

LOOPS = {
    "block in the loop": (nullcontext(), {}),
    "block around it": (torch.autocast("cpu", torch.bfloat16), {}),
    "disabled block around it": (torch.autocast("cpu", enabled=False), {}),
    "block around it, no cache": (torch.autocast("cpu", torch.bfloat16), {"cache_enabled": False}),
}
for name, (around, options) in LOOPS.items():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    outputs, weights = [], []
    with around:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, **options):
                output = model(torch.ones(1, 1))
            outputs.append(output.item())
            weights.append(model.weight.item())
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"{name}: weights {weights}, outputs {outputs}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
block in the loop: weights [1.0, 0.0, -1.0, -2.0], outputs [1.0, 0.0, -1.0, -2.0]
block around it: weights [1.0, 0.0, -1.0, -2.0], outputs [1.0, 1.0, 1.0, 1.0]
disabled block around it: weights [1.0, 0.0, -1.0, -2.0], outputs [1.0, 1.0, 1.0, 1.0]
block around it, no cache: weights [1.0, 0.0, -1.0, -2.0], outputs [1.0, 0.0, -1.0, -2.0]
SEEN
