#!/usr/bin/env bash
# transformers 5.23.0: which families count the padding on the left as positions.
#
# Expected: with an attention mask, rows padded on the left score as without padding, or none of the
#   models with absolute positions does; RWKV, which has no positions, does.
# Seen: without `position_ids` GPT-2, GPT-Neo, GPT-BigCode and XGLM move by 0.9 to 3.5 nats; OPT, BLOOM,
#   MPT and Falcon with ALiBi and Mamba do not. With position ids from the mask all but RWKV are right:
#   RWKV takes the mask and ignores it, so each pad token changes its state.
# Why it matters: `generate` makes position ids from the mask and a plain forward does not, so sampler and
#   trainer differ on the same row, in some families only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

plain = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
plain |= {"num_attention_heads": 4, "max_position_embeddings": 64}
gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES = {
    "llama": {}, "mamba": {}, "rwkv": {}, "gpt2": gpt2, "gpt_bigcode": gpt2,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 128},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64}, "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2}, "falcon": {"alibi": True},
}
torch.manual_seed(1)
text = torch.randint(3, 96, (1, 5))
padded = {"input_ids": torch.cat([torch.ones(1, 6, dtype=torch.long), text], dim=1)}
padded["attention_mask"] = (torch.arange(11) >= 6).long()[None]
positions = {"position_ids": (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)}
for family, sizes in FAMILIES.items():
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(plain | sizes))).eval()
    for parameter in lm.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    alone = lm(input_ids=text, use_cache=False).logits.log_softmax(-1)
    seen = []
    for arguments in ({}, positions):
        shifted = lm(**padded, **arguments, use_cache=False).logits[:, 6:].log_softmax(-1)
        gap = (shifted - alone)[:, :-1].gather(-1, text[:, 1:, None]).abs().max()
        seen.append("equal" if gap < 1e-4 else f"off by {gap:.1f} nats")
    print(f"{family}: {seen[0]}; with position ids {seen[1]}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
llama: equal; with position ids equal
mamba: equal; with position ids equal
rwkv: off by 3.2 nats; with position ids off by 3.2 nats
gpt2: off by 3.5 nats; with position ids equal
gpt_bigcode: off by 2.1 nats; with position ids equal
gpt_neo: off by 3.4 nats; with position ids equal
xglm: off by 0.9 nats; with position ids equal
opt: equal; with position ids equal
bloom: equal; with position ids equal
mpt: equal; with position ids equal
falcon: equal; with position ids equal
SEEN
