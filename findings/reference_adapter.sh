#!/usr/bin/env bash
# trl 1.16.0, peft 0.21.2: with the adapter disabled, PiSSA and `bias="all"` are not the base model.
#
# Expected: DPO with an adapter uses the model without it as reference, so its first loss is ln 2 and its
#   reference never moves, for every LoraConfig.
# Seen: PiSSA and OLoRA take their start out of the base weights, so the model with the adapter disabled is
#   another one from the first step on, and the first loss is not ln 2. `bias="all"` trains the base's
#   biases, which stay when the adapter is disabled: the reference follows the policy. LoRA and DoRA are
#   right.
# Why it matters: the implicit reward and its margins are measured from a model that nobody chose.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 trl==1.16.0 \
    peft==0.21.2 datasets==5.2.0 accelerate==1.15.0
cat > probe.py <<'PY'
import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

vocabulary = {word: number for number, word in enumerate(["<eos>", "<pad>", *"abcdefgh"])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="h"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16}
torch.manual_seed(0)
lm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attention_bias=True, pad_token_id=1))
for parameter in lm.parameters():
    parameter.data += 0.3 * torch.randn(parameter.shape)
lm.save_pretrained("model")
tokenizer.save_pretrained("model")
pairs = [{"prompt": "a", "chosen": " b c", "rejected": " d"}]
pairs += [{"prompt": "e", "chosen": " f", "rejected": " g h"}]
ids = torch.tensor([[2, 3, 4, 5, 6, 7]])
start, fixed = "init_lora_weights", {"use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1}
for extra in ({}, {"use_dora": True}, {start: "pissa"}, {start: "olora"}, {"bias": "all"}):
    base = AutoModelForCausalLM.from_pretrained("model")
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **extra)
    settings = DPOConfig("out", max_steps=5, learning_rate=0.01, beta=1.0, **fixed)
    rows = datasets.Dataset.from_list(pairs)
    trainer = DPOTrainer("model", args=settings, train_dataset=rows, peft_config=adapter)
    moved = []
    for train in (False, True):
        if train:
            trainer.train()
        with torch.no_grad(), trainer.model.disable_adapter():
            gap = (trainer.model.eval()(ids).logits - base(ids).logits).abs().max()
            moved.append("differs" if gap > 1e-3 else "equal")
    right = abs(trainer.state.log_history[0]["loss"] - 0.6931) < 1e-3
    with open("seen", "a") as file:
        print(f"{extra or 'LoRA'}: first loss is ln 2 {right}; reference against the base: "
              f"{moved[0]}, after 5 steps {moved[1]}", file=file)
PY
venv/bin/python probe.py > log 2>&1 || cat log
cat seen
diff - seen <<'SEEN'
LoRA: first loss is ln 2 True; reference against the base: equal, after 5 steps equal
{'use_dora': True}: first loss is ln 2 True; reference against the base: equal, after 5 steps equal
{'init_lora_weights': 'pissa'}: first loss is ln 2 False; reference against the base: differs, after 5 steps differs
{'init_lora_weights': 'olora'}: first loss is ln 2 False; reference against the base: differs, after 5 steps differs
{'bias': 'all'}: first loss is ln 2 True; reference against the base: equal, after 5 steps differs
SEEN
