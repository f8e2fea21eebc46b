#!/usr/bin/env bash
# torchao 0.18.0: low-bit AdamW moves a quiet weight up to six times too far, or not at all, beside a loud one.
#
# Expected: a weight whose gradient is always the same moves by the learning rate at each step, as Adam's do,
#   to within the rounding of the state; the worse, the more its gradient is smaller than its neighbours'.
# Seen: the state is scaled by the largest of its block (256, 128 for 4 bits). With 4 bits a gradient of a
#   tenth of the loudest moves a third as far, one of a hundredth hardly moves. With 8 bits one of 1/10,000,
#   and with Fp8 one of 1/1,000, moves the faster, the longer it trains: 6 times too far after 50 steps. The
#   error has both signs, and the first step is right.
# Why it matters: rows of an embedding, or a matrix with an outlier, train with a learning rate of their own
#   each; a comparison over the first steps shows nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 torchao==0.18.0 numpy==2.4.6
cat > probe.py <<'PY'
from functools import partial

import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

torch.compile = partial(torch.compile, backend="eager")  # needs no C++ compiler, and computes the same

for make in (torch.optim.AdamW, AdamW8bit, AdamWFp8, AdamW4bit):
    for quiet in (1e-1, 1e-2, 1e-3, 1e-4):
        gradient = torch.full((4096,), quiet)
        gradient[::128] = 1.0
        weight = torch.nn.Parameter(torch.zeros(4096))
        optimizer = make([weight], lr=1.0, eps=1e-12, weight_decay=0.0)
        moves = []
        for _ in range(50):
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            optimizer.step()
            moves.append((before - weight.detach())[1].item())
        shown = ", ".join(f"{moves[step - 1] + 0.0:.1f}" for step in (1, 2, 5, 20, 50))
        print(f"{make.__name__}, gradient {quiet:g} beside 1: moved by {shown} at steps 1, 2, 5, 20, 50")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
AdamW, gradient 0.1 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamW, gradient 0.01 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamW, gradient 0.001 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamW, gradient 0.0001 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamW8bit, gradient 0.1 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamW8bit, gradient 0.01 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamW8bit, gradient 0.001 beside 1: moved by 1.0, 1.0, 1.1, 1.1, 1.1 at steps 1, 2, 5, 20, 50
AdamW8bit, gradient 0.0001 beside 1: moved by 1.0, 1.3, 2.0, 4.0, 6.3 at steps 1, 2, 5, 20, 50
AdamWFp8, gradient 0.1 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamWFp8, gradient 0.01 beside 1: moved by 1.0, 1.0, 1.0, 1.0, 1.0 at steps 1, 2, 5, 20, 50
AdamWFp8, gradient 0.001 beside 1: moved by 1.0, 1.4, 2.2, 4.4, 6.8 at steps 1, 2, 5, 20, 50
AdamWFp8, gradient 0.0001 beside 1: moved by 1.0, 1.4, 2.2, 4.3, 6.7 at steps 1, 2, 5, 20, 50
AdamW4bit, gradient 0.1 beside 1: moved by 1.0, 0.5, 0.4, 0.3, 0.3 at steps 1, 2, 5, 20, 50
AdamW4bit, gradient 0.01 beside 1: moved by 1.0, 0.0, 0.0, 0.0, 0.0 at steps 1, 2, 5, 20, 50
AdamW4bit, gradient 0.001 beside 1: moved by 1.0, 0.0, 0.0, 0.0, 0.0 at steps 1, 2, 5, 20, 50
AdamW4bit, gradient 0.0001 beside 1: moved by 1.0, 0.0, 0.0, 0.0, 0.0 at steps 1, 2, 5, 20, 50
SEEN
