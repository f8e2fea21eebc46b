#!/usr/bin/env bash
# transformers 5.23.0: one call that cuts and pads changes the tokenizer that is saved.
#
# Expected: `truncation`, `max_length` and `padding` belong to the call; `save_pretrained` writes the
#   tokenizer that was loaded.
# Seen: a fast tokenizer keeps them until its next call, and tokenizer.json has them. transformers sets them
#   again at each call, so nothing shows there; the tokenizers library, which inference servers use, cuts
#   every text at that length and pads it. A call without arguments before saving mends it.
# Why it matters: a trainer whose last batch was cut at 512 tokens exports a model whose prompts are cut at
#   512 tokens wherever tokenizer.json is read, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.23.0 tokenizers==0.23.3
cat > probe.py <<'PY'
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

vocabulary = {word: number for number, word in enumerate(["<pad>", *"abcdefgh"])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def report(name):
    tokenizer.save_pretrained("saved")
    file = json.loads(Path("saved/tokenizer.json").read_text())
    short, long = "a b", "a b c d e f g h"
    raw = Tokenizer.from_file("saved/tokenizer.json")
    again = AutoTokenizer.from_pretrained("saved")
    print(f"{name}: file truncates {file['truncation'] is not None}, pads {file['padding'] is not None}; "
          f"tokens of 2 and 8 words: tokenizers {[len(raw.encode(text)) for text in (short, long)]}, "
          f"transformers {[len(again(text).input_ids) for text in (short, long)]}")


report("new")
tokenizer("a b c d e", truncation=True, max_length=4, padding="max_length")
report("after one call")
tokenizer("a")
report("after a call without arguments")
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
new: file truncates False, pads False; tokens of 2 and 8 words: tokenizers [2, 8], transformers [2, 8]
after one call: file truncates True, pads True; tokens of 2 and 8 words: tokenizers [4, 4], transformers [2, 8]
after a call without arguments: file truncates False, pads False; tokens of 2 and 8 words: tokenizers [2, 8], transformers [2, 8]
SEEN
