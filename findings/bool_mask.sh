#!/usr/bin/env bash
# transformers 5.23.0: a boolean mask of four dimensions is right with sdpa, silently wrong with eager.
#
# Expected: a mask (1, 1, T, T) of True and False, as `scaled_dot_product_attention` takes it, works with
#   every attention implementation, or is refused.
# Seen: with sdpa the second document of a row scores as it does alone. With eager the mask is added to
#   the scores: 1 where attention is allowed and 0 where it is not. The model sees every token, the later
#   ones too, and the log-probabilities are off by several nats.
# Why it matters: eager is the implementation that people choose to check another one, and the only one
#   of some families, so code that was right with Llama is wrong with them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
torch.manual_seed(0)
lm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
for parameter in lm.parameters():
    parameter.data += 0.3 * torch.randn(parameter.shape)
row = torch.randint(3, 96, (1, 12))
second = row[:, 7:]
document = (torch.arange(12) >= 7).long()
allowed = (document[:, None] == document) & torch.ones(12, 12).tril().bool()
added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
alone = lm(input_ids=second).logits.log_softmax(-1)
for implementation in ("sdpa", "eager"):
    lm.set_attn_implementation(implementation)
    for name, mask in (("bool", allowed), ("float", added)):
        logits = lm(input_ids=row, position_ids=positions, attention_mask=mask[None, None]).logits
        gaps = (logits[:, 7:].log_softmax(-1) - alone)[:, :-1].gather(-1, second[:, 1:, None])
        gap = gaps.abs().max()
        print(f"{implementation}, {name}: {'equal' if gap < 1e-4 else f'off by {gap:.0f} nats'}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
sdpa, bool: equal
sdpa, float: equal
eager, bool: off by 6 nats
eager, float: equal
SEEN
