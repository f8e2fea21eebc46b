#!/usr/bin/env bash
# transformers 5.23.0: four accumulation steps make a classifier's gradient four times as large.
#
# Expected: Trainer divides by the accumulation steps, or by the number of labels of the whole batch, for
#   every model: the gradient of 8 rows is the same in 1, 2 and 4 parts.
# Seen: language models are right. The gradient and the logged loss of a sequence classifier grow with the
#   number of parts, and so does the balancing loss of a mixture of experts, in the same step in which the
#   loss of its tokens is right.
# Why it matters: a reward model or a mixture that takes more accumulation steps to fit into memory is
#   trained with another clipping, learning rate or balance.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > probe.py <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
balance = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 1000.0}
CASES = {
    "language model": (LlamaForCausalLM, LlamaConfig(**sizes)),
    "classifier": (LlamaForSequenceClassification, LlamaConfig(**sizes, num_labels=1)),
    "mixture without balance": (MixtralForCausalLM, MixtralConfig(**sizes, num_local_experts=4)),
    "mixture, mostly balance": (MixtralForCausalLM, MixtralConfig(**sizes, **balance)),
}
rows = [{"input_ids": [5 + i, 6, 7, 8], "labels": [5 + i, 6, 7, 8]} for i in range(8)]
labelled = [row | {"labels": float(i % 2)} for i, row in enumerate(rows)]
for name, (make, config) in CASES.items():
    logs = []
    for parts in (1, 2, 4):
        torch.manual_seed(0)
        plan = {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
        fixed = {"learning_rate": 0.0, "use_cpu": True, "bf16": False, "save_strategy": "no"}
        settings = TrainingArguments("out", max_steps=1, logging_steps=1, report_to=[], **plan, **fixed)
        trainer = Trainer(make(config), settings, train_dataset=labelled if name == "classifier" else rows)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    with open("seen", "a") as file:
        for key in ("loss", "grad_norm"):
            ratios = [f"{log[key] / logs[0][key]:.0f}" for log in logs]
            print(f"{name}: {key} in 1, 2, 4 parts, relative to 1: {', '.join(ratios)}", file=file)
PY
venv/bin/python probe.py > log 2>&1 || cat log
cat seen
diff - seen <<'SEEN'
language model: loss in 1, 2, 4 parts, relative to 1: 1, 1, 1
language model: grad_norm in 1, 2, 4 parts, relative to 1: 1, 1, 1
classifier: loss in 1, 2, 4 parts, relative to 1: 1, 2, 4
classifier: grad_norm in 1, 2, 4 parts, relative to 1: 1, 2, 4
mixture without balance: loss in 1, 2, 4 parts, relative to 1: 1, 1, 1
mixture without balance: grad_norm in 1, 2, 4 parts, relative to 1: 1, 1, 1
mixture, mostly balance: loss in 1, 2, 4 parts, relative to 1: 1, 2, 4
mixture, mostly balance: grad_norm in 1, 2, 4 parts, relative to 1: 1, 2, 4
SEEN
