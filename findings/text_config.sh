#!/usr/bin/env bash
# transformers 5.23.0: the text model of a text-and-vision folder, asked for by its config, is random.
#
# Expected: `AutoModelForCausalLM.from_pretrained(folder, config=config.text_config)` loads the text part,
#   or raises an error.
# Seen: it returns a model of the right class and shape in which no weight is from the files. The report
#   of missing keys is a warning; `output_loading_info` lists every parameter as missing.
# Why it matters: training runs, the loss falls, and nothing of the pretrained model is in it. Load the
#   whole model and take its language model instead.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6 pillow==12.3.0
cat > probe.py <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 64}
text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
vision |= {"image_size": 16, "patch_size": 8}
torch.manual_seed(0)
whole = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config=vision))
whole.save_pretrained("model")
config = AutoConfig.from_pretrained("model")
lm, info = AutoModelForCausalLM.from_pretrained(
    "model", config=config.text_config, output_loading_info=True
)
ids = torch.arange(1, 9)[None]
with torch.no_grad():
    gap = (lm(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max()
names = [name for name, _ in lm.named_parameters()]
print(type(whole).__name__, "->", type(lm).__name__)
print("missing parameters:", len(set(names) & set(info["missing_keys"])), "of", len(names))
print("logits differ:", bool(gap > 0.1))
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
Gemma3ForConditionalGeneration -> Gemma3ForCausalLM
missing parameters: 15 of 15
logits differ: True
SEEN
