#!/usr/bin/env bash
# transformers 5.23.0: a class of your own over Falcon-H1's loads its multipliers as they lie in memory.
#
# Expected: `class Mine(FalconH1PreTrainedModel)` around a FalconH1Model, read by `from_pretrained`, computes
#   what FalconH1ForCausalLM computes: all its weights are in the files.
# Seen: the multipliers of the Mamba layers are a buffer that no file holds and that the family fills when it
#   initialises. transformers takes a class of another module than its own for remote code and does not
#   initialise what has all its weights; no warning. With `__module__` set to transformers' the buffer is right.
# Why it matters: a reward or value head in a class of its own gives nan or nonsense, for this family only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, FalconH1Model
from transformers.models.falcon_h1 import modeling_falcon_h1 as family

shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "mamba_d_ssm": 32}
shape |= {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
FalconH1ForCausalLM(FalconH1Config(**shape)).save_pretrained("model")


def made(**fields):
    class Mine(family.FalconH1PreTrainedModel):
        vars().update(fields)

        def __init__(self, config):
            super().__init__(config)
            self.model = FalconH1Model(config)
            self.post_init()

    return Mine


def is_initialised(kind):
    # Memory that held other numbers before, as it does in a longer program
    held = [torch.full((n,), 7.0) for n in range(1, 512) for _ in range(20)]
    del held
    lm = kind.from_pretrained("model")
    return bool((lm.model.layers[0].mamba.mup_vector == 1).all())


print("FalconH1ForCausalLM:", is_initialised(FalconH1ForCausalLM))
print("a class of another module:", is_initialised(made()))
print("the same, with the family's __module__:", is_initialised(made(__module__=family.__name__)))
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
FalconH1ForCausalLM: True
a class of another module: False
the same, with the family's __module__: True
SEEN
