#!/usr/bin/env bash
# torch 2.13.0: after an evaluation under FSDP2, changes of the root's weights are lost or late.
#
# Expected: a forward under `no_grad` leaves the model as it was: a change of its parameters in place
#   stays, and an optimiser step is seen by the next forward.
# Seen: the parameters that the root module has itself (here the first and third layer; in a language
#   model embedding, last norm and head) stay gathered after a forward without a backward, and
#   `parameters()` gives the gathered copies. Doubled, they are doubled until the next backward; then the
#   old shards are back. A step between an evaluation and the next forward changes the shards, and that
#   forward still uses the old copies. `reshard_after_forward=True` on the root mends both.
# Why it matters: weight averaging, an update of the reference, or an evaluation between backward and
#   step change the blocks of a model and not its head, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
inputs = torch.ones(1, 2)


def build(**options):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
    for parameter in model.parameters():
        torch.nn.init.eye_(parameter)
    fully_shard(model[1])
    return fully_shard(model, **options)


def evaluate(model):
    with torch.no_grad():
        return model(inputs)[0, 0].item()


for options in ({}, {"reshard_after_forward": True}):
    doubled = build(**options)
    evaluate(doubled)
    kinds = [type(parameter).__name__ for parameter in doubled.parameters()]
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    outputs = [evaluate(doubled)]
    doubled(inputs).sum().backward()
    outputs.append(evaluate(doubled))
    stepped = build(**options)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.25)
    stepped(inputs).sum().backward()
    evaluate(stepped)
    optimizer.step()
    late = [evaluate(stepped)]
    stepped.reshard()
    late.append(evaluate(stepped))
    if dist.get_rank() == 0:
        print(options, kinds)
        print(f"  three weights doubled: output {outputs[0]}, after the next backward {outputs[1]}")
        print(f"  step after an evaluation: output {late[0]}, after reshard() {late[1]}")
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc_per_node 2 probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
{} ['Parameter', 'DTensor', 'Parameter']
  three weights doubled: output 8.0, after the next backward 2.0
  step after an evaluation: output 0.5, after reshard() 0.125
{'reshard_after_forward': True} ['DTensor', 'DTensor', 'DTensor']
  three weights doubled: output 8.0, after the next backward 8.0
  step after an evaluation: output 0.125, after reshard() 0.125
SEEN
