#!/usr/bin/env bash
# peft 0.21.2: in a mixture of experts `target_modules` leaves the layers without experts out.
#
# Expected: gate_proj, up_proj and down_proj adapt the plain layer of that name in a dense layer, and
#   in the others the experts, which transformers 5 stacks.
# Seen: for Qwen3-MoE with one dense layer (`mlp_only_layers`) the names are turned into parameters of
#   the experts for the whole model: the dense layer's three matrices stay frozen, without a warning.
#   up_proj alone is refused, also as a pattern that only the dense layer's path matches.
# Why it matters: a LoRA that is said to train every MLP trains none of the dense ones; the config that
#   is saved has no target_modules at all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy==2.4.6
cat > probe.py <<'PY'
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 64}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
config = Qwen3MoeConfig(**sizes, **heads, **experts, num_hidden_layers=2)
for targets in (["gate_proj", "up_proj", "down_proj"], ["up_proj"], r".*layers\.0\.mlp\.up_proj"):
    model = Qwen3MoeForCausalLM(config)
    try:
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    except ValueError as error:
        print(targets, "ValueError:", str(error)[:52])
        continue
    names = {name.split(".lora_")[0] for name, _ in adapted.named_parameters() if "lora_" in name}
    settings = adapted.peft_config["default"]
    print(targets, "adapted:", sorted({name.split("model.layers.")[1][:13] for name in names}))
    print("modules:", settings.target_modules, "parameters:", sorted(settings.target_parameters))
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
['gate_proj', 'up_proj', 'down_proj'] adapted: ['1.mlp.experts']
modules: set() parameters: ['down_proj', 'gate_up_proj']
['up_proj'] ValueError: Cannot convert PEFT target(s) up_proj without also t
.*layers\.0\.mlp\.up_proj ValueError: Cannot convert PEFT target(s) up_proj without also t
SEEN
