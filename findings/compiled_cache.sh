#!/usr/bin/env bash
# torch 2.13.0: what torch.compile keeps on the disk is used on a CPU of other instructions, and is wrong.
#
# Expected: the key of inductor's cache holds the instructions that its C++ was written for, as those of its
#   compiled files do; or the other CPU compiles anew.
# Seen (CPU with AVX-512; ATEN_CPU_CAPABILITY imitates the others): the C++ that was written for vectors of 16
#   numbers is found again and compiled for vectors of 8. Its numbers are wrong, or NaN, without an error or a
#   warning. Where torch uses no vectors it does not compile. With an empty cache all are right.
# Why it matters: homes, and so caches, are shared by the machines of a cluster, and images keep them.
set -euo pipefail
if ! grep -q avx512f /proc/cpuinfo; then
    echo "this script needs a CPU with AVX-512" >&2
    exit 1
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch


def normalised(x):
    return 2 * torch.nn.functional.layer_norm(x, (64,))


torch.manual_seed(0)
x = torch.randn(64, 64)
capability = torch.backends.cpu.get_cpu_capability()
try:
    compiled = torch.compile(normalised)(x)
    seen = "right" if torch.allclose(compiled, normalised(x), atol=1e-5) else "wrong, without an error"
except Exception as error:
    seen = next(word for word in ("C++ compile error", type(error).__name__) if word in str(error))
print(f"{capability}: {seen}")
PY
for cache in shared own; do
    for capability in avx512 avx2 default; do
        TORCHINDUCTOR_CACHE_DIR="$folder/$cache/${cache/own/$capability}" ATEN_CPU_CAPABILITY=$capability \
            OMP_NUM_THREADS=1 venv/bin/python probe.py 2>> log | sed "s/^/$cache cache, /" >> seen
    done
done
cat seen
diff - seen <<'SEEN'
shared cache, AVX512: right
shared cache, AVX2: wrong, without an error
shared cache, DEFAULT: C++ compile error
own cache, AVX512: right
own cache, AVX2: right
own cache, DEFAULT: right
SEEN
