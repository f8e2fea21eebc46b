"""Claim: rows of messages train on what the tokenizer's chat template writes, and on nothing else.

Prompt and completion joined are the rendered conversation, the completion begins where the
assistant's turn does and ends in the stop token, and a prompt of messages is never cut.
"""

import json

import pytest
import tiny
from tokenizers.processors import TemplateProcessing

from common import synthetic
from common.chat import render, split_shared_messages
from common.config import UserError
from common.data import load_examples
from common.rows import load_rows

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
ANSWER, OTHER = ([{"role": "assistant", "content": text}] for text in ("Because.", "Ask again."))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = synthetic.train_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def load(tmp_path, tokenizer, kind, row, **limits):
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    config = tiny.train_config(**({"max_prompt_length": 60} | limits))
    stop_ids = [tokenizer.eos_token_id]
    return load_examples(config, str(tmp_path / "train.jsonl"), "train", kind, tokenizer, stop_ids)


def test_a_prompt_ends_where_the_turn_of_the_assistant_begins(tmp_path, tokenizer):
    row = {"prompt": ASKED, "completion": ANSWER, "topic": "none"}
    (example,) = load(tmp_path, tokenizer, "sft", row)
    assert tokenizer.decode(example.prompt_ids) == example.prompt
    assert example.prompt == "<system>Be brief.<|endoftext|>\n<user>Why?<|endoftext|>\n<assistant>"
    assert tokenizer.decode(example.completions[0]) == "Because.<|endoftext|>"
    assert example.columns == {"topic": "none"}


def test_the_prompt_of_two_conversations_is_what_they_share(tmp_path, tokenizer):
    pair = {"chosen": ASKED + ANSWER, "rejected": ASKED + OTHER}
    assert split_shared_messages(pair) == {"prompt": ASKED, "chosen": ANSWER, "rejected": OTHER}
    explicit = {"prompt": ASKED, "chosen": ANSWER, "rejected": OTHER}
    (found,), (expected,) = (load(tmp_path, tokenizer, "preference", r) for r in (pair, explicit))
    assert found == expected
    texts = [tokenizer.decode(ids) for ids in found.completions]
    assert texts == ["Because.<|endoftext|>", "Ask again.<|endoftext|>"]


@pytest.mark.parametrize("truncation", ["tldr", "start"])
def test_a_conversation_is_not_cut(tmp_path, tokenizer, truncation):
    limits = {"max_prompt_length": 10, "prompt_truncation": truncation}
    with pytest.raises(UserError, match="1 prompt over max_prompt_length"):
        load(tmp_path, tokenizer, "prompts", {"prompt": ASKED}, **limits)


def test_pairs_of_conversations_that_do_not_differ_or_share_nothing(tmp_path, tokenizer):
    same = {"chosen": ASKED + ANSWER, "rejected": ASKED + ANSWER}
    with pytest.raises(UserError, match="1 identical pair"):
        load(tmp_path, tokenizer, "preference", same)
    with pytest.raises(UserError, match="begin differently"):
        split_shared_messages({"chosen": ANSWER, "rejected": OTHER})


def test_a_bos_that_the_template_writes_is_there_once_and_costs_one_token(tmp_path):
    tokenizer = synthetic.train_tokenizer()
    bos = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = bos
    tokenizer.chat_template = "<|endoftext|>" + TEMPLATE
    row = {"prompt": ASKED}
    (example,) = load(tmp_path, tokenizer, "prompts", row)
    assert example.prompt_ids.count(0) == 3  # bos, and an end after each message
    length = len(example.prompt_ids)
    assert load(tmp_path, tokenizer, "prompts", row, max_prompt_length=length) == [example]
    with pytest.raises(UserError, match="1 prompt over max_prompt_length"):
        load(tmp_path, tokenizer, "prompts", row, max_prompt_length=length - 1)


def test_text_is_left_as_it_is(tokenizer):
    row = {"prompt": "Why?", "completion": " Because."}
    assert render(row, ["completion"], tokenizer) is row


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "cannot render them"),
        ("{{ raise_exception('No system turn') }}", "No system turn"),
        ("{{ messages | length }}{% if add_generation_prompt %}A{% endif %}", "writes a prompt"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(template, words):
    tokenizer = synthetic.train_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=words) as caught:
        render({"prompt": ASKED, "completion": ANSWER}, ["completion"], tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "completion": " text"},
        {"prompt": "text", "completion": ANSWER},
        {"prompt": [{"role": "user"}], "completion": ANSWER},
        {"prompt": [{"role": "user", "content": None}], "completion": ANSWER},
        {"prompt": [], "completion": ANSWER},
        {"prompt": ASKED, "completion": []},
    ],
)
def test_rows_that_are_neither_text_nor_messages_are_refused(tmp_path, row):
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="row 1.*(both be messages|list of messages)"):
        load_rows(str(tmp_path / "train.jsonl"), "train", kind="sft", seed=0)
