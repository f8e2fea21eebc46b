#!/usr/bin/env bash
# transformers 5.23.0: `dynamic` and `longrope` scale a short row by the longest row of its batch.
#
# Expected: a row's log-probabilities do not depend on the rows next to it, as with every other rope type;
#   and the log-probabilities of `generate` are those of one forward over the whole row.
# Seen: where one row is longer than the original context, the frequencies of the whole batch change, and
#   the log-probabilities of a short row next to it move by 3 and 5 nats. Alone it scores as before. A
#   completion that crosses the context is generated with other frequencies than a forward over the whole
#   row has: its log-probabilities differ from the first token on.
# Why it matters: a log-ratio between policy and reference needs the same batches on both sides, and in
#   policy-gradient training the sampler is not the policy that is trained, by several nats.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
long = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
four = {"factor": 4.0}
KINDS = {"default": ({}, 128), "linear": (four, 128), "dynamic": (four, 32), "longrope": (long, 128)}
torch.manual_seed(1)
rows = torch.randint(3, 96, (2, 60))
short = rows[:1, :16]
mask = torch.ones(2, 60, dtype=torch.long)
mask[0, 16:] = 0
for kind, (fields, length) in KINDS.items():
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | fields
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=length, rope_parameters=rope)
    lm = LlamaForCausalLM(config).eval()
    for parameter in lm.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)

    def logps(logits, ids):
        return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    def word(gap):
        return "equal" if gap.abs().max() < 1e-3 else f"off by {gap.abs().max():.0f} nats"

    with torch.no_grad():
        alone = logps(lm(short).logits[:, :-1], short[:, 1:])
        batch = logps(lm(rows, attention_mask=mask).logits[:1, :15], short[:, 1:])
        again = logps(lm(short).logits[:, :-1], short[:, 1:])
        options = {"max_new_tokens": 30, "do_sample": False, "output_logits": True, "pad_token_id": 0}
        made = lm.generate(rows[:1, :20], return_dict_in_generate=True, eos_token_id=None, **options)
        ids = made.sequences[:, 20:]
        sampled = logps(torch.stack(made.logits, dim=1), ids)
        scored = logps(lm(made.sequences, use_cache=False).logits[:, 19:-1], ids)
    print(f"{kind}: in a batch {word(batch - alone)}; alone again {word(again - alone)}; "
          f"first token generated {word((sampled - scored)[:, 0])}, all {word(sampled - scored)}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
default: in a batch equal; alone again equal; first token generated equal, all equal
linear: in a batch equal; alone again equal; first token generated equal, all equal
dynamic: in a batch off by 3 nats; alone again equal; first token generated off by 2 nats, all off by 8 nats
longrope: in a batch off by 5 nats; alone again equal; first token generated off by 4 nats, all off by 12 nats
SEEN
