#!/usr/bin/env bash
# trl 1.16.0: GRPO's rollouts obey settings of the model's generation_config.json that its loss ignores.
#
# Expected: completions are drawn from softmax(logits / temperature) with the flags of GRPOConfig; what else
#   the model's folder recommends for chatting is overridden or refused, as its `top_k` and `top_p` are.
# Seen: `no_repeat_ngram_size`, `min_new_tokens` and `suppress_tokens` of the folder change what is sampled.
#   The loss has the log-probabilities of softmax(logits / temperature), where the tokens that could not
#   be drawn keep their probability.
# Why it matters: the gradient belongs to another sampler than the one that drew. A policy cannot learn to
#   stop before `min_new_tokens`, and no message says why.
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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

vocabulary = {word: number for number, word in enumerate(["<eos>", "<pad>", *"abcdefgh"])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="h"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 10}
ends = {"pad_token_id": 1, "eos_token_id": 0, "bos_token_id": 0}
prompts = datasets.Dataset.from_list([{"prompt": "a b"}] * 8)
fields = {"top_k": 1, "no_repeat_ngram_size": 1, "min_new_tokens": 8, "suppress_tokens": [0]}
drawn = []


def reward(completion_ids, **columns):
    drawn.extend(completion_ids)
    return [float(len(ids)) for ids in completion_ids]


for field, value in {"max_length": 20, **fields}.items():
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **ends))
    setattr(lm.generation_config, field, value)
    drawn.clear()
    plan = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": 8}
    fixed = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    settings = GRPOConfig("out", max_steps=1, **plan, **fixed)
    GRPOTrainer(lm, reward, args=settings, train_dataset=prompts, processing_class=tokenizer).train()
    repeats = any(len(set(ids)) < len(ids) for ids in drawn)
    short = any(len(ids) < 8 for ids in drawn)
    with open("seen", "a") as file:
        print(f"{field}: {value}: of {len(drawn)} completions some repeat a token {repeats}, some are short "
              f"{short}, all are equal {len(set(map(tuple, drawn))) == 1}", file=file)
PY
venv/bin/python probe.py > log 2>&1 || cat log
cat seen
diff - seen <<'SEEN'
max_length: 20: of 64 completions some repeat a token True, some are short True, all are equal False
top_k: 1: of 64 completions some repeat a token True, some are short True, all are equal False
no_repeat_ngram_size: 1: of 64 completions some repeat a token False, some are short True, all are equal False
min_new_tokens: 8: of 64 completions some repeat a token True, some are short False, all are equal False
suppress_tokens: [0]: of 64 completions some repeat a token True, some are short False, all are equal False
SEEN
