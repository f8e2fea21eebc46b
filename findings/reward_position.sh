#!/usr/bin/env bash
# transformers 5.23.0: sequence classifiers look for the last token by its id, not by the mask.
#
# Expected: with an attention mask the reward is read at the last token that the mask counts.
# Seen: it is read at the last token whose id is not the pad id, whatever the mask says. Where pad and eos
#   are one token, as in GPT-2 and many exported models, a completion that ends with eos is scored at the
#   token before it, with padding or without.
# Why it matters: a finished and an unfinished completion have the same reward, so a policy is not rewarded
#   for stopping, and a reward model that was trained to be read at eos is read elsewhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

plain = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
plain |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
plain |= {"num_labels": 1, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4}
opt = {"word_embed_proj_dim": 64, "ffn_dim": 128}
FAMILIES = {"llama": {}, "qwen3": {}, "gemma3_text": {}, "gpt2": gpt2, "gpt_neox": {}, "opt": opt}
ROWS = {
    "stopped, padded": ([5, 6, 7, 0, 0, 0], [1, 1, 1, 1, 0, 0]),
    "stopped": ([5, 6, 7, 0], [1, 1, 1, 1]),
    "not stopped": ([5, 6, 7], [1, 1, 1]),
}
for family, sizes in FAMILIES.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(plain | sizes))
    model = AutoModelForSequenceClassification.from_config(config).eval()
    seen = []
    for name, (ids, mask) in ROWS.items():
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])}
        each = model.score(model.base_model(**inputs).last_hidden_state)[0, :, 0]
        place = (each - model(**inputs).logits[0, 0]).abs().argmin().item() + 1
        seen.append(f"{name}: token {place} of {sum(mask)}")
    print(f"{family}:", "; ".join(seen))
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
llama: stopped, padded: token 3 of 4; stopped: token 3 of 4; not stopped: token 3 of 3
qwen3: stopped, padded: token 3 of 4; stopped: token 3 of 4; not stopped: token 3 of 3
gemma3_text: stopped, padded: token 3 of 4; stopped: token 3 of 4; not stopped: token 3 of 3
gpt2: stopped, padded: token 3 of 4; stopped: token 3 of 4; not stopped: token 3 of 3
gpt_neox: stopped, padded: token 3 of 4; stopped: token 3 of 4; not stopped: token 3 of 3
opt: stopped, padded: token 3 of 4; stopped: token 3 of 4; not stopped: token 3 of 3
SEEN
