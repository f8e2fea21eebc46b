#!/usr/bin/env bash
# peft 0.21.2: merging and unmerging at each step of training moves the frozen base in bfloat16.
#
# Expected: `unmerge_adapter` gives back the weights that `merge_adapter` met, or ones off by a last bit, which
#   the next rounds do not move further; over a training they stay near.
# Seen: nothing is kept aside; the change is subtracted again, rounded each time. In bfloat16, while the adapter
#   grows to 5 % of the weights in 1,000 steps, half of the frozen weights move: after 100 steps by a third of
#   the adapter's change, in the end by a fifth. In float32 none moves.
# Why it matters: this is how trainers hand an adapter's policy to a sampler. The adapter that is saved belongs
#   to a base that no file has, and the reference, which is the model with the adapter disabled, moves.
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

sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(dtype)
    settings = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(lm, settings)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    frozen = layer.base_layer.weight
    start = frozen.detach().float()
    rows = layer.lora_B["default"].weight
    with torch.no_grad():
        scale = 0.05 * start.norm() / layer.get_delta_weight("default").float().norm()
        growth = rows * scale / 1000
        rows.zero_()
        for step in range(1, 1001):
            rows += growth
            model.merge_adapter()
            model.unmerge_adapter()
            if step in (1, 100, 300, 1000):
                error = frozen.float() - start
                change = layer.get_delta_weight("default").float().norm()
                moved, size = (error != 0).float().mean(), error.norm() / change
                print(f"{dtype}, step {step}: {moved:.1f} of the frozen weights moved, "
                      f"by {size:.1f} of the adapter's change")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
torch.float32, step 1: 0.0 of the frozen weights moved, by 0.0 of the adapter's change
torch.float32, step 100: 0.0 of the frozen weights moved, by 0.0 of the adapter's change
torch.float32, step 300: 0.0 of the frozen weights moved, by 0.0 of the adapter's change
torch.float32, step 1000: 0.0 of the frozen weights moved, by 0.0 of the adapter's change
torch.bfloat16, step 1: 0.0 of the frozen weights moved, by 0.0 of the adapter's change
torch.bfloat16, step 100: 0.2 of the frozen weights moved, by 0.3 of the adapter's change
torch.bfloat16, step 300: 0.4 of the frozen weights moved, by 0.3 of the adapter's change
torch.bfloat16, step 1000: 0.5 of the frozen weights moved, by 0.2 of the adapter's change
SEEN
