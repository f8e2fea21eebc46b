"""Claim: SFT on a conversation trains every turn of the assistant, and nothing else.

The targets are transformers' own mask of a template with {% generation %}, TRL's labels with
`assistant_only_loss`, and a loss from plain transformers.
"""

import copy
import json
from typing import Any

import pytest
import tiny
import torch
from torch.nn.functional import cross_entropy

from common import data
from common.errors import UserError
from common.evaluation import pair_scores, score
from common.losses import sft_loss
from common.rewards.models import RewardModelFunction
from common.scoring import Policy
from common.text import synthetic, token_cache

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OUTSIDE = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# As Qwen3's: thoughts stand in the last turn only
THOUGHTS = tiny.CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<t>{% endif %}{{ m.content }}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, AGAIN, LAST = ({"role": "user", "content": t} for t in ("Why?", "And then?", "So?"))
TOOL = {"role": "tool", "content": "42"}
ONE, TWO, THREE = (
    {"role": "assistant", "content": text} for text in ("Because.", "It\nends.", "No idea.")
)
CONVERSATIONS = {
    "three turns": [SYSTEM, ASKED, ONE, AGAIN, TWO, LAST, THREE],
    "turns of the assistant together": [ASKED, ONE, TWO, AGAIN, THREE],
    "a tool between": [ASKED, ONE, TOOL, TWO],
    "an empty answer first": [ASKED, {**ONE, "content": ""}, AGAIN, TWO, LAST, THREE],
}


@pytest.fixture(scope="module")
def chatml() -> Any:
    """A tokenizer whose turns end in a special token, which is its eos."""
    tokenizer = synthetic.train_tokenizer(300)
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    tokenizer.chat_template = tiny.CHATML
    return tokenizer


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def load(tmp_path, tokenizer, *rows, kind="sft", **limits) -> Any:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny.train_config(
        dataset_name=str(tmp_path / "train.jsonl"),
        dataset_test_split="",
        **({"max_prompt_length": 90, "max_completion_length": 120} | limits),
    )
    return data.load_splits(config, kind, tokenizer, [tokenizer.eos_token_id])[0]


def trained(example: Any) -> list[bool]:
    """Of prompt and completion, which ids count in the loss."""
    mask = data.collate([piece(example)], "padded", 1).completion_mask[0].tolist()
    return [False] * len(example.prompt_ids) + mask


def piece(example: Any) -> data.Piece:
    places = [example.row]
    return data.Piece(example.prompt_ids, example.completions, places, trained=example.trained)


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED, END_OUTSIDE])
@pytest.mark.parametrize("form", CONVERSATIONS)
def test_the_mask_is_that_of_transformers(tmp_path, chatml, form: str, template: str):
    messages = CONVERSATIONS[form]
    (example,) = load(tmp_path, with_template(chatml, template), {"messages": messages})
    expected = with_template(chatml, MARKED).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = example.prompt_ids + example.completions[0]
    *whole, line_break = expected["input_ids"]  # behind the last stop token
    assert ids == whole
    assert chatml.decode(line_break) == "\n"
    assert trained(example) == [bool(count) for count in expected["assistant_masks"][:-1]]
    assert sum(trained(example)) > 10


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [SYSTEM, ASKED], "completion": [ONE, AGAIN, TWO]},
        {"completion": [SYSTEM, ASKED, ONE, AGAIN, TWO]},
        {"messages": [SYSTEM, ASKED, ONE, AGAIN, TWO, LAST]},  # which nobody answers
        {"prompt": [SYSTEM, ASKED, {**ONE, "content": "Be"}], "completion": [
            {**ONE, "content": "cause."}, AGAIN, TWO
        ]},
    ],
)  # fmt: skip
def test_every_form_is_the_same_conversation(tmp_path, chatml, row: dict):
    (example,) = load(tmp_path, chatml, row)
    (expected,) = load(tmp_path, chatml, {"messages": [SYSTEM, ASKED, ONE, AGAIN, TWO]})
    texts = (chatml.decode(e.prompt_ids + e.completions[0]) for e in (example, expected))
    assert next(texts) == next(texts)
    begun = len(chatml.encode("Be")) if row.get("prompt", [])[2:] else 0
    assert sum(trained(example)) == sum(trained(expected)) - begun


def test_an_opening_of_the_assistant_is_read_and_one_answer_of_a_prompt_is_not_several(
    tmp_path, chatml
):
    (opened,) = load(tmp_path, chatml, {"messages": [ONE, ASKED, TWO]})
    (explicit,) = load(tmp_path, chatml, {"prompt": [ASKED, ONE, AGAIN], "completion": [TWO]})
    for example in (opened, explicit):
        assert example.trained == []
        assert chatml.decode(example.completions[0]) == "It\nends.<|im_end|>"
    with pytest.raises(UserError, match="1 empty completion"):
        load(tmp_path, chatml, {"messages": [ONE]})


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_the_loss_is_that_of_plain_transformers(tmp_path, chatml, layout: str):
    rows = [{"messages": messages} for messages in CONVERSATIONS.values()]
    rows.append({"prompt": [ASKED], "completion": [TWO]})
    examples = load(tmp_path, chatml, *rows)
    sizes = {"vocab_size": len(chatml), "max_position_embeddings": 256}
    lm, plain = (tiny.causal_lm("llama", is_plain=is_plain, **sizes) for is_plain in (False, True))
    total, count = torch.tensor(0.0), 0
    marked = with_template(chatml, MARKED)
    for row in rows:
        messages = row.get("messages") or row["prompt"] + row["completion"]
        given = marked.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        labels = given["input_ids"].masked_fill(given["assistant_masks"] == 0, -100)
        logits = plain(given["input_ids"]).logits[0, :-1]
        total = total + cross_entropy(logits, labels[0, 1:], reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    expected = total / count
    expected.backward()

    batch = data.collate([piece(example) for example in examples], layout, 1)
    assert batch.num_tokens == count
    loss = sft_loss(Policy(lm)(batch).token_logps, batch.completion_mask, num_tokens=count)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for own, other in zip(lm.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-5)
    config = tiny.train_config(layout=layout)
    found = score.mean_sft_loss(Policy(lm), examples, config, 1)
    assert found == pytest.approx(float(expected.detach()), abs=1e-5)


def test_trl_trains_the_same_tokens(tmp_path, chatml):
    trl_code = pytest.importorskip("trl_code")
    rows = [{"messages": messages} for messages in CONVERSATIONS.values()]
    expected = trl_code.sft_labels(rows, with_template(chatml, MARKED))
    for example, (ids, labels) in zip(
        load(tmp_path, chatml, *rows),
        zip(expected["input_ids"], expected["labels"], strict=True),
        strict=True,
    ):
        assert example.prompt_ids + example.completions[0] == list(ids)[:-1]
        assert trained(example) == [label != -100 for label in labels][:-1]


def test_an_answer_written_anew_ends_with_the_end_of_a_turn(tmp_path, chatml):
    messages = CONVERSATIONS["three turns"]
    (example,) = load(tmp_path, with_template(chatml, THOUGHTS), {"messages": messages})
    (plain,) = load(tmp_path, chatml, {"messages": messages})
    assert example.trained[:2] == plain.trained[:2]
    (ids,) = example.completions
    texts = [chatml.decode(ids[start:end]) for start, end in example.trained]
    assert texts == ["Because.<|im_end|>", "It\nends.<|im_end|>", "<t>No idea.<|im_end|>"]
    numbered = with_template(chatml, "{{ messages | length }}" + tiny.CHATML)
    with pytest.raises(UserError, match="writes a prompt differently once an answer follows"):
        load(tmp_path, numbered, {"messages": messages})


def test_a_call_that_the_template_leaves_unmarked_is_read(tmp_path, chatml, capsys):
    """As first answer: the mask is that of transformers by the same template."""
    calls = "{% if m.tool_calls is defined %}CALL<|im_end|>{% elif m.role == 'assistant' %}"
    template = MARKED.replace("{% if m.role == 'assistant' %}", calls)
    tokenizer, turns = with_template(chatml, template), [ASKED, CALL, TOOL, ONE, AGAIN, TWO]
    (example,) = load(tmp_path, tokenizer, {"messages": turns})
    expected = tokenizer.apply_chat_template(
        [ASKED, {**CALL, "content": ""}, *turns[2:]],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert trained(example) == [bool(count) for count in expected["assistant_masks"][:-1]]
    (ids,) = example.completions
    texts = [chatml.decode(ids[start:end]) for start, end in example.trained]
    assert texts == ["Because.<|im_end|>", "It\nends.<|im_end|>"]
    assert "2 answers each" in capsys.readouterr().out
    start = example.trained[0][0]
    with pytest.raises(UserError, match="1 no answer within max_completion_length"):
        load(tmp_path, tokenizer, {"messages": turns}, max_completion_length=start)


def test_what_is_cut_is_counted_and_every_run_shows_what_it_trains(tmp_path, chatml, capsys):
    row = {"messages": CONVERSATIONS["three turns"]}
    (whole,) = load(tmp_path, chatml, row)
    told = capsys.readouterr().out
    share = sum(trained(whole)) / len(whole.completions[0])
    assert (
        f"conversations: 3 answers each, {share:.0%} of the completions' tokens; 0 answers" in told
    )
    shown = r"assistant\n[[Because.<|im_end|>]]\n<|im_start|>user\nAnd then?<|im_end|>\n"
    assert "row 1, [[trained]]: <|im_start|>system\\nBe brief.<|im_end|>" in told
    assert shown in told

    (start, end), second = whole.trained[0], whole.trained[1]
    (cut,) = load(tmp_path, chatml, row, max_completion_length=second[0], num_sample_prompts=0)
    assert cut.trained == [[start, end]]
    assert cut.completions == [whole.completions[0][:end]]  # a question is not read in vain
    told = capsys.readouterr().out
    assert "truncated 0 prompts and 1 completions" in told
    assert "2 answers lost to max_completion_length" in told
    assert "[[" not in told
    (cut,) = load(tmp_path, chatml, row, max_completion_length=second[0] + 1)
    assert cut.trained == [[start, end], [second[0], second[0] + 1]]


def test_turns_are_the_same_from_the_cache(tmp_path, chatml, monkeypatch):
    rows = [{"messages": messages} for messages in CONVERSATIONS.values()]
    made = load(tmp_path, chatml, *rows)
    monkeypatch.setattr(token_cache, "MIN_ROWS", 1)
    cache = {"token_cache_dir": str(tmp_path / "cache")}
    for _ in range(2):
        found = load(tmp_path, chatml, *rows, **cache)
        assert isinstance(found, token_cache.Stored)
        assert list(found) == made


# ---- tools ---------------------------------------------------------------------------------------

TOOLS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}{{ '\n' }}"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
    "{% endfor %}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ mood }}{% endif %}"
)
SCHEMA = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}


@pytest.mark.parametrize("tools", [SCHEMA, json.dumps(SCHEMA)])
def test_tools_and_calls_reach_the_template(tmp_path, chatml, tools: Any):
    tokenizer = with_template(chatml, TOOLS)
    turns = [{**ASKED, "tool_calls": None}, CALL, TOOL, TWO]  # null: Parquet's, of other rows
    (example,) = load(tmp_path, tokenizer, {"messages": turns, "tools": tools})
    assert example.prompt.startswith("<tools>add\n<|im_start|>user\nWhy?<|im_end|>\n")
    texts = [chatml.decode(example.completions[0][a:b]) for a, b in example.trained]
    assert texts == ["<call>add<|im_end|>", "It\nends.<|im_end|>"]
    asked = {"prompt": [ASKED], "tools": tools, "chat_template_kwargs": {"mood": "Hm. "}}
    pair = {**asked, "chosen": [CALL], "rejected": [TWO]}
    with pytest.raises(UserError, match="writes a prompt differently"):  # "Hm." is no message
        load(tmp_path, tokenizer, pair, kind="preference")
    (prompt,) = load(tmp_path, tokenizer, asked, kind="prompts")
    assert prompt.prompt.startswith("<tools>add\n")
    assert prompt.prompt.endswith("assistant\nHm. ")
    pair = {k: v for k, v in pair.items() if k != "chat_template_kwargs"}
    (example,) = load(tmp_path, tokenizer, pair, kind="preference")
    assert chatml.decode(example.completions[0]) == "<call>add<|im_end|>"


@pytest.mark.usefixtures("process_group")
def test_a_judge_with_another_template_is_told_of_the_tools(tmp_path, chatml, monkeypatch):
    """By GRPO's rewards and by evaluate.py, which scores the completions of pairs."""
    tiny.classifier("llama", vocab_size=len(chatml)).save_pretrained(tmp_path)
    with_template(chatml, "{{ mood }}" + TOOLS.replace("{{ mood }}", "")).save_pretrained(tmp_path)
    config = tiny.train_config(max_prompt_length=60, max_completion_length=20)
    judge = RewardModelFunction(str(tmp_path), chatml, config)
    options = {"tools": SCHEMA, "chat_template_kwargs": {"mood": "Hm. "}}
    read: list[data.Piece] = []
    rewards = lambda pieces: read.extend(pieces) or [0.0] * sum(len(p.places) for p in pieces)  # noqa: E731
    monkeypatch.setattr(judge, "rewards", rewards)
    columns = {name: [value] for name, value in options.items()}
    judge([[ASKED]], [[TWO]], [[3]], prompt_ids=[[1]], has_stop=[True], **columns)
    pair = {"prompt": [ASKED], "chosen": [ONE], "rejected": [TWO], **options}
    pairs = load(tmp_path, chatml, pair, kind="preference")
    pair_scores.reward_scores(judge, pairs, chatml, [chatml.eos_token_id], config)
    prompts = [chatml.decode(piece.prompt_ids) for piece in read]
    assert prompts == [prompts[0]] * 2
    assert prompts[0].startswith("Hm. <tools>add\n<|im_start|>user\nWhy?")


def test_tools_that_are_no_json_are_refused(tmp_path, chatml):
    with pytest.raises(UserError, match="column 'tools' holds text that is no JSON"):
        load(tmp_path, chatml, {"messages": [ASKED, ONE], "tools": "add"})
