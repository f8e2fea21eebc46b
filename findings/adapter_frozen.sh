#!/usr/bin/env bash
# peft 0.21.2: `with model.disable_adapter()` leaves frozen adapters trainable.
#
# Expected: after the block every parameter has the `requires_grad` that it had before.
# Seen: all matrices of the adapter are trainable afterwards, also those of an adapter that was loaded
#   with `is_trainable=False`, and a `lora_A` that was frozen on purpose (as LoRA-FA does).
# Why it matters: the block is the usual way to get the reference's log-probabilities in DPO and GRPO.
#   An optimiser that was made before and holds all parameters begins to train what was frozen.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy==2.4.6
cat > probe.py <<'PY'
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
config = LlamaConfig(**sizes, num_attention_heads=4)


def trainable(model):
    return sorted(name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad)


def report(name, model):
    before = trainable(model)
    with model.disable_adapter():
        pass
    print(f"{name}: before {before}, after {trainable(model)}")


lora = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
report("new", lora)
lora.save_pretrained("adapter")
report("for inference", PeftModel.from_pretrained(LlamaForCausalLM(config), "adapter"))
for name, parameter in lora.named_parameters():
    if "lora_A" in name:
        parameter.requires_grad_(False)
report("lora_A frozen", lora)
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
new: before ['lora_A', 'lora_B'], after ['lora_A', 'lora_B']
for inference: before [], after ['lora_A', 'lora_B']
lora_A frozen: before ['lora_B'], after ['lora_A', 'lora_B']
SEEN
