#!/usr/bin/env bash
# verl 0.9.1, OpenRLHF 0.11.2: the k3 penalty has no gradient where the reference is 14 times likelier.
#
# Expected: k3 (exp(-d) - 1 + d, d = log pi - log ref) pulls the harder, the further the policy is below
#   the reference; a guard against overflow begins at log-ratios of 20 and more.
# Seen: both cut the value at 10 by a clamp, whose gradient is 0. That is at d = -2.61, so a token that
#   the reference gives 14 times the policy's probability is not pulled back at all. In OpenRLHF k2 ends at
#   4.5 nats and k1 at 10. It is verl's default of the KL in the loss (`low_var_kl`); `k3+` has a gradient.
# Why it matters: the KL bounds a policy only while it is close. Tokens that it has given up are free, and
#   the logged KL, cut in the same way, hides it. TRL does not cut.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/pip install --quiet --no-deps verl==0.9.1 openrlhf==0.11.2
cat > probe.py <<'PY'
import ast
import sysconfig
from pathlib import Path

import torch

PACKAGES = Path(sysconfig.get_path("purelib"))


def functions(file, names):
    """The named functions of a file whose imports (ray, deepspeed) are not installed."""
    source = (PACKAGES / file).read_text()
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") in names]
    parts = [ast.get_source_segment(source, node) for node in found]
    scope = {"torch": torch}
    exec("\n\n".join(["from __future__ import annotations", *parts]), scope)
    return scope


verl = functions("verl/trainer/ppo/core_algos.py", ["kl_penalty", "kl_penalty_forward"])["kl_penalty"]
approx = functions("openrlhf/models/utils.py", ["compute_approx_kl"])["compute_approx_kl"]
ESTIMATES = {
    "verl k2": lambda d: verl(d, 0 * d.detach(), "k2"),
    "verl low_var_kl": lambda d: verl(d, 0 * d.detach(), "low_var_kl"),
    "verl k3+": lambda d: verl(d, 0 * d.detach(), "k3+"),
    "OpenRLHF k1": lambda d: approx(d, 0 * d.detach(), kl_estimator="k1"),
    "OpenRLHF k2": lambda d: approx(d, 0 * d.detach(), kl_estimator="k2"),
    "OpenRLHF k3": lambda d: approx(d, 0 * d.detach(), kl_estimator="k3"),
}
points = (-12.0, -5.0, -2.62, -2.61, -1.0, 1.0, 5.0)
print("log pi - log ref:", *points)
for name, estimate in ESTIMATES.items():
    difference = torch.tensor(points, requires_grad=True)
    value = estimate(difference)
    gradient = torch.autograd.grad(value.sum(), difference)[0]
    print(f"{name}: value", *(f"{v:.1f}" for v in value), "| gradient", *(f"{g + 0.0:.1f}" for g in gradient))
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
log pi - log ref: -12.0 -5.0 -2.62 -2.61 -1.0 1.0 5.0
verl k2: value 72.0 12.5 3.4 3.4 0.5 0.5 12.5 | gradient -12.0 -5.0 -2.6 -2.6 -1.0 1.0 5.0
verl low_var_kl: value 10.0 10.0 10.0 10.0 0.7 0.4 4.0 | gradient 0.0 0.0 0.0 -12.6 -1.7 0.6 1.0
verl k3+: value 10.0 10.0 10.0 10.0 0.7 0.4 4.0 | gradient -12.0 -5.0 -2.6 -2.6 -1.0 1.0 5.0
OpenRLHF k1: value -10.0 -5.0 -2.6 -2.6 -1.0 1.0 5.0 | gradient 0.0 1.0 1.0 1.0 1.0 1.0 1.0
OpenRLHF k2: value 10.0 10.0 3.4 3.4 0.5 0.5 10.0 | gradient 0.0 0.0 -2.6 -2.6 -1.0 1.0 0.0
OpenRLHF k3: value 10.0 10.0 10.0 10.0 0.7 0.4 4.0 | gradient 0.0 0.0 0.0 -12.6 -1.7 0.6 1.0
SEEN
