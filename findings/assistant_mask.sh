#!/usr/bin/env bash
# transformers 5.23.0: a reply that begins with a space ends the assistant mask, one that ends with it has no end.
#
# Expected: `apply_chat_template(..., return_assistant_tokens_mask=True)` marks the tokens of each generation
#   block, whatever white space the reply begins or ends with.
# Seen: with a byte-level tokenizer whose post-processor trims offsets (the default of `ByteLevel`) a token of
#   a space belongs to no character. A reply that begins with a space is not marked, nor is any later one. One
#   that ends with a space marks the whole rest of the row, the user's turns and the template's words too.
#   Line breaks are right, and so is a tokenizer that does not trim.
# Why it matters: supervised training on the assistant's tokens silently learns from no reply after that one, or
#   learns to write the user's turns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
cat > probe.py <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

template = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "bot:{% generation %}{{ m.content }}{% endgeneration %}<eos>"
    "{% else %}user:{{ m.content }}{% endif %}{% endfor %}"
)
letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
trainer = trainers.BpeTrainer(
    vocab_size=400, special_tokens=["<eos>"], initial_alphabet=letters.alphabet(), show_progress=False
)
model = Tokenizer(models.BPE())
model.pre_tokenizer = letters
model.train_from_iterator(["user:why<eos>bot:one<eos> two three"] * 9, trainer)
for trim in (False, True):
    model.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")
    for reply in ("two", " two", "two ", "\ntwo", "two\n"):
        messages = []
        for text in ("one", reply, "three"):
            messages.append({"role": "user", "content": "why"})
            messages.append({"role": "assistant", "content": text})
        row = tokenizer.apply_chat_template(
            messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
        )
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        marked = [token for token, marks in zip(tokens, row["assistant_masks"]) if marks]
        print(f"trim_offsets={trim}, second reply {reply!r}: {' '.join(marked)}")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
trim_offsets=False, second reply 'two': one t wo t hr ee
trim_offsets=False, second reply ' two': one Ġtwo t hr ee
trim_offsets=False, second reply 'two ': one t wo Ġ t hr ee
trim_offsets=False, second reply '\ntwo': one Ċ t wo t hr ee
trim_offsets=False, second reply 'two\n': one t wo Ċ t hr ee
trim_offsets=True, second reply 'two': one t wo t hr ee
trim_offsets=True, second reply ' two': one
trim_offsets=True, second reply 'two ': one t wo Ġ <eos> user : why bot : t hr ee <eos>
trim_offsets=True, second reply '\ntwo': one Ċ t wo t hr ee
trim_offsets=True, second reply 'two\n': one t wo Ċ t hr ee
SEEN
