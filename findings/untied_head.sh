#!/usr/bin/env bash
# transformers 5.23.0: a head that the files untie is lost by the next call that ties by the config.
#
# Expected: config.json says tied, so `from_pretrained` drops the head in the files (as version 4 did),
#   or keeps it and sets `config.tie_word_embeddings` to False.
# Seen: it keeps the files' head, and the config still says tied. Saving and loading again keeps it.
#   But `resize_token_embeddings` and `tie_weights` replace the head by the embedding, and
#   `from_config(model.config)` with `load_state_dict(model.state_dict())` reports "All keys matched"
#   and has the head in place of the embedding: one storage is written twice.
# Why it matters: a reference model, a sampler's copy or a rank's shell that is built from the config
#   is another model than the one that was loaded. Adding one pad token is enough.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
import json
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
torch.manual_seed(0)
made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False))
made.save_pretrained("model")
config = json.loads(Path("model/config.json").read_text()) | {"tie_word_embeddings": True}
Path("model/config.json").write_text(json.dumps(config))


def report(name, model):
    embedding, head = (
        torch.equal(getattr(model, f"get_{kind}_embeddings")().weight[:64], weight)
        for kind, weight in (("input", made.model.embed_tokens.weight), ("output", made.lm_head.weight))
    )
    print(f"{name}: embedding as saved {embedding}, head as saved {head}, tied by config "
          f"{model.config.tie_word_embeddings}")


loaded = AutoModelForCausalLM.from_pretrained("model")
report("loaded", loaded)
loaded.save_pretrained("again")
report("saved and loaded", AutoModelForCausalLM.from_pretrained("again"))
resized = deepcopy(loaded)
resized.resize_token_embeddings(65)
report("one token more", resized)
copied = AutoModelForCausalLM.from_config(loaded.config)
print(copied.load_state_dict(loaded.state_dict()))
report("copied by config", copied)
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
loaded: embedding as saved True, head as saved True, tied by config True
saved and loaded: embedding as saved True, head as saved True, tied by config True
one token more: embedding as saved True, head as saved False, tied by config True
<All keys matched successfully>
copied by config: embedding as saved False, head as saved True, tied by config True
SEEN
