#!/usr/bin/env bash
# trl 1.16.0, peft 0.21.2: a reward model with LoRA and no `task_type` keeps a random head and loses it.
#
# Expected: RewardTrainer makes a new head, so it trains and saves it, whatever the LoRA's `task_type` is,
#   or refuses a config without one.
# Seen: without `task_type` the head is frozen at its random values, and the adapter's folder does not have
#   it: whoever loads the folder gets another random head. No error; the loss falls all the same, since the
#   adapter learns to suit that head. With `task_type="SEQ_CLS"` the head is trained and saved.
# Why it matters: the config that is right for SFT and DPO gives a reward model whose rewards are noise
#   after it was loaded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 trl==1.16.0 \
    peft==0.21.2 datasets==5.2.0 accelerate==1.15.0
cat > probe.py <<'PY'
import datasets
from peft import LoraConfig
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

vocabulary = {word: number for number, word in enumerate(["<eos>", "<pad>", *"abcdefgh"])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="h"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16}
LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=1)).save_pretrained("model")
tokenizer.save_pretrained("model")
pairs = datasets.Dataset.from_list([{"chosen": "a b", "rejected": "a c"}] * 4)
fixed = {"use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1}
for task in (None, "SEQ_CLS"):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    settings = RewardConfig("out", max_steps=40, learning_rate=0.01, **fixed)
    trainer = RewardTrainer("model", args=settings, train_dataset=pairs, peft_config=adapter)
    heads = [parameter for name, parameter in trainer.model.named_parameters() if "score" in name]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model("saved")
    with safe_open("saved/adapter_model.safetensors", "pt") as weights:
        saved = any("score" in name for name in weights.keys())
    trained = any(head.requires_grad for head in heads)
    with open("seen", "a") as file:
        print(f"task_type {task}: head trained {trained}, saved {saved}; "
              f"loss fell {losses[-1] < 0.9 * losses[0]}", file=file)
PY
venv/bin/python probe.py > log 2>&1 || cat log
cat seen
diff - seen <<'SEEN'
task_type None: head trained False, saved False; loss fell True
task_type SEQ_CLS: head trained True, saved True; loss fell True
SEEN
