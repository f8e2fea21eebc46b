#!/usr/bin/env bash
# transformers 5.23.0: Aya Vision leaves out the logit scale of the Cohere model that it is built on.
#
# Expected: on a text without pictures AyaVisionForConditionalGeneration gives the logits of its own text model,
#   as Gemma 3, Mistral 3, LLaVA or InternVL do.
# Seen: it projects and does not multiply by `text_config.logit_scale` (0.0625 by default), which
#   Cohere2ForCausalLM does. The most likely token is the same; the whole is 16 times as sure of it.
# Why it matters: log-probabilities, KL and sampling at a temperature are those of another distribution once
#   the text model is taken out, or put back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6 pillow==12.3.0
cat > probe.py <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
ids = torch.arange(1, 9)[None]
for family, text, tower in [("aya_vision", "cohere2", "siglip_vision_model"), ("llava", "llama", "clip_vision_model")]:
    torch.manual_seed(0)
    parts = {"text_config": {"model_type": text, **shape}, "vision_config": {"model_type": tower, **vision}}
    whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **parts)).eval()
    alone = AutoModelForCausalLM.from_config(whole.config.text_config).eval()
    alone.base_model.load_state_dict(whole.get_decoder().state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    with torch.no_grad():
        ratio = (whole(input_ids=ids).logits / alone(input_ids=ids).logits).nanmedian()
    print(f"{family}: logits are {float(ratio):.2f} times those of its text model")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
aya_vision: logits are 16.00 times those of its text model
llava: logits are 1.00 times those of its text model
SEEN
