#!/usr/bin/env bash
# torch 2.13.0: a fused optimiser's step is no change that autograd notices.
#
# Expected: a step changes parameters in place, so it raises their version, and a backward through a
#   graph that was made before the step is refused, whichever implementation of AdamW steps.
# Seen: loop and foreach raise the version by 2, and that backward is a RuntimeError. With fused=True
#   the version stays, and the backward silently uses the new weight: 1.49 where the graph's was 2.
# Why it matters: an old graph that is used after a step (a replayed rollout, a delayed backward) has
#   wrong gradients without a word; caches that look at `_version` to see that weights have changed
#   (a low-precision copy, a quantised one) go stale. `torch.autograd.graph.increment_version` behind
#   the step mends both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch

for kind in ("loop", "foreach", "fused"):
    weight = torch.nn.Parameter(torch.tensor([[2.0]]))
    flags = {"foreach": kind == "foreach", "fused": kind == "fused"}
    optimizer = torch.optim.AdamW([weight], lr=0.5, **flags)
    inputs = torch.tensor([[3.0]], requires_grad=True)
    output = (inputs @ weight).sum()
    weight.grad = torch.ones_like(weight)
    before = weight._version
    optimizer.step()
    try:
        gradient = f"{torch.autograd.grad(output, inputs)[0].item():.2f}"
    except RuntimeError as error:
        gradient = f"RuntimeError, {'modified by an inplace operation' in str(error)}"
    print(f"{kind}: version +{weight._version - before}, gradient of the old graph: {gradient}")
PY
venv/bin/python probe.py > seen
cat seen
diff - seen <<'SEEN'
loop: version +2, gradient of the old graph: RuntimeError, True
foreach: version +2, gradient of the old graph: RuntimeError, True
fused: version +0, gradient of the old graph: 1.49
SEEN
