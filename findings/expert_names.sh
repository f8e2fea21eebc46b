#!/usr/bin/env bash
# transformers 5.23.0: `save_pretrained` writes other names and shapes than `state_dict()` has.
#
# Expected: the files of a Mixtral hold the tensors of `state_dict()` under its names.
# Seen: in memory the experts of a layer are two stacked tensors of `mlp.experts`; in the files each
#   expert has three matrices under `block_sparse_moe`, as version 4 had them. Files with the stacked
#   names load as well, with nothing missing, nothing unexpected and no warning.
# Why it matters: a script that writes a sharded `state_dict()` under the names of an earlier
#   `save_pretrained`, or compares the two, finds no common name for nine tenths of the weights; and
#   peft's `target_modules` taken from the names in the files match nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
model = MixtralForCausalLM(config)
weights = model.state_dict()
model.save_pretrained("model")


def experts(weights):
    return {name.split("layers.0.")[1]: list(w.shape) for name, w in weights.items() if "expert" in name}


print("state_dict:", experts(weights))
for name, shape in experts(load_file("model/model.safetensors")).items():
    print("file:", name, shape)
config.save_pretrained("stacked")
save_file(weights, "stacked/model.safetensors", metadata={"format": "pt"})
loaded, info = MixtralForCausalLM.from_pretrained("stacked", output_loading_info=True)
same = all((loaded.state_dict()[name] == weight).all() for name, weight in weights.items())
print("stacked names load:", bool(same), "| complaints:", sum(map(len, info.values())))
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
state_dict: {'mlp.experts.gate_up_proj': [2, 128, 32], 'mlp.experts.down_proj': [2, 32, 64]}
file: block_sparse_moe.experts.0.w1.weight [64, 32]
file: block_sparse_moe.experts.0.w2.weight [32, 64]
file: block_sparse_moe.experts.0.w3.weight [64, 32]
file: block_sparse_moe.experts.1.w1.weight [64, 32]
file: block_sparse_moe.experts.1.w2.weight [32, 64]
file: block_sparse_moe.experts.1.w3.weight [64, 32]
stacked names load: True | complaints: 0
SEEN
