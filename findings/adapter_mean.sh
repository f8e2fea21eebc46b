#!/usr/bin/env bash
# peft 0.21.2: the mean of a LoRA adapter with itself is twice the adapter.
#
# Expected: `add_weighted_adapter` with weights 0.5 and 0.5, combination type "linear", averages the two
#   changes of the weights: the mean of an adapter with itself is that adapter.
# Seen: "linear" sums the matrices A and the matrices B, with the square roots of the weights, and the
#   product of the sums has cross terms. Two equal adapters give twice the mean; of two independent ones
#   the cross terms, which neither has, are as large as the mean. "cat" is the mean.
# Why it matters: averages of checkpoints or of seeds, and policies merged from several, are other models
#   than meant; a KL to the reference that is too large is the only sign.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96}
torch.manual_seed(0)
settings = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
lm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
model = get_peft_model(lm, settings, "first")
model.add_adapter("second", settings)
layer = model.base_model.model.model.layers[0].self_attn.q_proj
for names in (["first", "first"], ["first", "second"]):
    mean = sum(layer.get_delta_weight(name) for name in names) / 2
    for kind in ("linear", "cat"):
        model.add_weighted_adapter(names, [0.5, 0.5], "mean", combination_type=kind)
        change = layer.get_delta_weight("mean")
        size, error = change.norm() / mean.norm(), (change - mean).norm() / mean.norm()
        print(f"{' and '.join(names)}, {kind}: {size:.1f} times the mean's size, error {error:.1f}")
        model.delete_adapter("mean")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
first and first, linear: 2.0 times the mean's size, error 1.0
first and first, cat: 1.0 times the mean's size, error 0.0
first and second, linear: 1.4 times the mean's size, error 1.0
first and second, cat: 1.0 times the mean's size, error 0.0
SEEN
