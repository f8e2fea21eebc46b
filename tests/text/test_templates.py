"""Claim: a conversation is one row per answer, of what its chat template writes.

The templates are of the kinds that model families have, written from their public conventions;
what each writes for an answer is written out by hand, and compared with `apply_chat_template` too.
About `common.text.chat`.
"""

import json
from typing import Any, NamedTuple

import pytest
import tiny
from tokenizers.processors import TemplateProcessing

from common import data
from common.errors import UserError
from common.evaluation import measure
from common.rewards.models import RewardModelFunction
from common.text import reading, synthetic


class Kind(NamedTuple):
    """A chat template and what it writes for an answer $A, a thought $T and a call."""

    template: str
    stops: tuple[str, ...]
    answer: str
    thought: str = ""  # empty: the template leaves thoughts out
    call: str = ""  # empty: it leaves calls out


def turns(start: str, end: str, answer: str = "{{ m.content }}", before: str = "") -> str:
    """Every message between two texts, in which ROLE is its role; `answer` is the assistant's."""
    return (
        before
        + "{% for m in messages %}"
        + start.replace("ROLE", "{{ m.role }}")
        + "{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + start.replace("ROLE", "assistant")
        + "{% endif %}"
    )


CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ ARGS }}</call>{% endfor %}"
TOJSON = "{{ m.content }}" + CALLS.replace("ARGS", "c.function.arguments | tojson")
AS_TEXT = "{{ m.content }}" + CALLS.replace("ARGS", "c.function.arguments + ''")
ITEMS = "{{ m.content }}" + CALLS.replace(
    "{{ ARGS }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
# Thoughts are written in the last turn only (Qwen3), there also where there is none
THINKS = (
    "{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}" + TOJSON
)
OPENS = THINKS.replace("{% if loop.last %}", "{% if true %}")
OBJECT, ITEM = '<call>add {"a": "1"}</call>', "<call>add a=1</call>"
CHATML = ("<|im_start|>ROLE\n", "<|im_end|>\n")
IM = ("<|im_end|>",)
KINDS = {
    "ChatML": Kind(turns(*CHATML), IM, "$A<|im_end|>"),
    "Qwen2.5": Kind(turns(*CHATML, answer=TOJSON), IM, "$A<|im_end|>", "", f"{OBJECT}<|im_end|>"),
    "Qwen3": Kind(
        turns(*CHATML, answer=THINKS),
        IM,
        "<think>\n\n</think>\n\n$A<|im_end|>",
        "<think>\n$T\n</think>\n\n$A<|im_end|>",
        f"<think>\n\n</think>\n\n{OBJECT}<|im_end|>",
    ),
    "Qwen3-Thinking": Kind(
        turns(*CHATML, answer=OPENS).replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
        IM,
        "\n</think>\n\n$A<|im_end|>",
        "$T\n</think>\n\n$A<|im_end|>",
        f"\n</think>\n\n{OBJECT}<|im_end|>",
    ),
    "Yi": Kind(turns("<|im_start|>ROLE\n", "<|im_end|>"), ("<|end|>", *IM), "$A<|im_end|>"),
    "Llama 2": Kind(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' ~ m.content ~ ' </s>' }}"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        ("</s>",),
        " $A </s>",
    ),
    "Llama 3": Kind(
        turns(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n",
            "<|eot_id|>",
            before="<|bos|>",
            answer=TOJSON.replace("{{ m.content }}", "{{ m.content | trim }}"),
        ),
        ("<|end_of_text|>", "<|eot_id|>"),
        "$A<|eot_id|>",
        "",
        f"{OBJECT}<|eot_id|>",
    ),
    "Gemma": Kind(
        turns("<start_of_turn>ROLE\n", "<end_of_turn>\n", before="<|bos|>"),
        ("<eos>", "<end_of_turn>"),
        "$A<end_of_turn>",
    ),
    "Phi-3": Kind(
        turns("<|ROLE|>\n", "<|end|>\n")
        + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
        ("<|endoftext|>", "<|end|>"),
        "$A<|end|>",
    ),
    "GLM-4.5": Kind(
        turns("<|ROLE|>", "", answer="<think>{{ m.reasoning_content or '' }}</think>\n" + ITEMS),
        ("<|endoftext|>", "<|user|>"),
        "<think></think>\n$A<|endoftext|>",
        "<think>$T</think>\n$A<|endoftext|>",
        f"<think></think>\n{ITEM}<|endoftext|>",
    ),
    "gpt-oss": Kind(
        turns(
            "<|start|>ROLE",
            "",
            answer="{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
            "<|start|>assistant{% endif %}{% if m.tool_calls %}<|channel|>commentary to="
            "{{ m.tool_calls[0].function.name }}<|message|>"
            "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
            "{% else %}<|channel|>final<|message|>{{ m.content }}"
            "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endif %}",
        ),
        ("<|return|>", "<|call|>"),
        "<|channel|>final<|message|>$A<|return|>",
        "<|channel|>analysis<|message|>$T<|end|><|start|>assistant<|channel|>final<|message|>$A<|return|>",
        '<|channel|>commentary to=add<|message|>{"a": "1"}<|call|>',
    ),
    "DeepSeek-V3": Kind(
        turns("<|ROLE|>", "", answer=AS_TEXT + "<|eos|>"),
        ("<|eos|>",),
        "$A<|eos|>",
        "",
        '<call>add {"a": "1"}</call><|eos|>',
    ),
    "OLMo-2": Kind(
        turns("<|ROLE|>\n", "\n", "{{ m.content }}<|eos|>", before="<|eos|>"),
        ("<|eos|>",),
        "$A<|eos|>",
    ),
    "Qwen3-Coder": Kind(turns(*CHATML, answer=ITEMS), IM, "$A<|im_end|>", "", f"{ITEM}<|im_end|>"),
}
SYSTEM, ASKED, AGAIN = (
    {"role": role, "content": text}
    for role, text in (("system", "Be brief."), ("user", "Why?"), ("user", "And then?"))
)
ONE, TWO = ({"role": "assistant", "content": text} for text in ("Because.", "It\nends."))
TOOL = {"role": "tool", "content": "42"}
THOUGHT = {**TWO, "reasoning_content": "Hm.", "thinking": "Hm."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "1"}}}],
}
TEXT_CALL = json.loads(json.dumps(CALL))
TEXT_CALL["tool_calls"][0]["function"]["arguments"] = '{"a": "1"}'


def tokenizer_of(kind: Kind) -> Any:
    """A tokenizer that adds a bos to texts, with a kind's stop tokens; the first is its eos."""
    tokenizer = synthetic.train_tokenizer(300)
    tokens = [*kind.stops, "<|bos|>"]
    tokenizer.add_special_tokens({"eos_token": tokens[0], "additional_special_tokens": tokens[1:]})
    bos = tokenizer.convert_tokens_to_ids("<|bos|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    tokenizer.chat_template = kind.template
    return tokenizer


def load(tmp_path, tokenizer, *rows, kind="sft", stops=(), **limits) -> Any:
    name = str(tiny.write_rows(tmp_path / "train.jsonl", rows))
    fields = {"max_prompt_length": 400, "max_completion_length": 120} | limits
    config = tiny.train_config(dataset_name=name, dataset_test_split="", **fields)
    stop_ids = tokenizer.convert_tokens_to_ids([*stops]) or [tokenizer.eos_token_id]
    return reading.load_splits(config, kind, tiny.vocabulary(stop_ids, tokenizer))[0]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["answers", "thought", "call"])
def test_what_is_trained_is_what_the_template_writes(tmp_path, name: str, form: str):
    kind, last = KINDS[name], {"answers": TWO, "thought": THOUGHT, "call": CALL}[form]
    last = TEXT_CALL if form == "call" and name == "DeepSeek-V3" else last
    tokenizer, messages = tokenizer_of(kind), [SYSTEM, ASKED, ONE, AGAIN, last]
    if form != "answers" and not getattr(kind, form):
        with pytest.raises(
            UserError, match="1 (answer left out in part by the chat template|empty completion)"
        ):
            load(tmp_path, tokenizer, {"messages": messages}, stops=kind.stops)
        return
    examples = load(tmp_path, tokenizer, {"messages": messages}, stops=kind.stops)
    texts = (kind.answer, kind.answer if form == "answers" else getattr(kind, form))
    expected = [
        text.replace("$A", message["content"]).replace("$T", "Hm.")
        for text, message in zip(texts, (ONE, last), strict=True)
    ]
    assert [tokenizer.decode(e.completions[0]) for e in examples] == expected
    for example, end in zip(examples, (2, 4), strict=True):
        asked = tokenizer.apply_chat_template(
            messages[:end], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert example.prompt_ids == list(asked), "the tokens of the template, and no other bos"
        assert example.row == 0
        if form == "answers":
            whole = tokenizer.apply_chat_template(messages[: end + 1], tokenize=False)
            text = example.prompt + tokenizer.decode(example.completions[0])
            assert text.removesuffix(kind.stops[0]).startswith(whole) or whole.startswith(text)


def decoded(tokenizer: Any, examples: Any) -> list[tuple[str, ...]]:
    return [tuple(map(tokenizer.decode, (e.prompt_ids, *e.completions))) for e in examples]


@pytest.fixture(scope="module")
def chatml() -> Any:
    return tokenizer_of(KINDS["ChatML"])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [SYSTEM, ASKED], "completion": [ONE, AGAIN, TWO]},
        {"completion": [SYSTEM, ASKED, ONE, AGAIN, TWO]},
        {"messages": [SYSTEM, ASKED, ONE, AGAIN, TWO, AGAIN]},  # which nobody answers
    ],
)
def test_every_form_is_the_same_conversation(tmp_path, chatml, capsys, row: dict):
    expected = load(tmp_path, chatml, {"messages": [SYSTEM, ASKED, ONE, AGAIN, TWO]})
    found = load(tmp_path, chatml, row)
    assert decoded(chatml, found) == decoded(chatml, expected)
    assert len(found) == 2
    printed = capsys.readouterr().out
    assert r"user\nWhy?<|im_end|>\n<|im_start|>assistant\n[[Because.<|im_end|>]]" in printed


def test_answers_may_follow_each_other_go_on_with_a_prompt_and_be_left_out(tmp_path, chatml):
    together = load(tmp_path, chatml, {"messages": [ASKED, CALL, TOOL, ONE, TWO]}, {"messages": [
        ASKED, {**ONE, "weight": 0}, AGAIN, {**TWO, "train": False}, AGAIN, ONE
    ]}, max_dropped_fraction=0.5)  # fmt: skip
    assert [(e.row, chatml.decode(e.completions[0])) for e in together] == [
        (0, "Because.<|im_end|>"),
        (0, "It\nends.<|im_end|>"),
        (1, "Because.<|im_end|>"),
    ]
    assert together[2].prompt.count("assistant") == 3
    with pytest.raises(UserError, match="has nothing to train: every answer has weight 0"):
        load(tmp_path, chatml, {"messages": [ASKED, {**ONE, "weight": 0}]})
    begun = {"prompt": [ASKED, {**ONE, "content": "Be"}], "completion": [
        {**ONE, "content": "cause."}, AGAIN, TWO
    ]}  # fmt: skip
    first, second = decoded(chatml, load(tmp_path, chatml, begun))
    assert first[0].endswith("assistant\nBe")
    assert first[1] == "cause.<|im_end|>"
    assert "assistant\nBecause.<|im_end|>\n" in second[0]


@pytest.mark.parametrize(
    "template",
    [
        KINDS["ChatML"].template.replace(  # R1 and QwQ open a thought and write none
            "assistant\n{% endif", "assistant\n<think>\n{% endif"
        ),
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "  # Mistral's system message
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{% endif %}"
        "{% endfor %}",
    ],
)
def test_a_prompt_that_is_another_one_in_use_is_refused(tmp_path, chatml, template: str):
    tokenizer = tiny.with_template(chatml, template)
    with pytest.raises(UserError, match="writes a prompt differently once an answer follows, '"):
        load(tmp_path, tokenizer, {"messages": [SYSTEM, ASKED, ONE]})


def test_the_report_counts_answers_that_the_template_cuts(tmp_path, capsys):
    thought = {**ONE, "content": "<think>use</think>Because."}
    dropping = tokenizer_of(KINDS["ChatML"])
    dropping.chat_template = dropping.chat_template.replace(
        "{% if m.role == 'assistant' %}{{ m.content }}",
        "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}",
    )
    rows = [{"messages": [ASKED, ONE, AGAIN, TWO]}, {"messages": [ASKED, thought]}]
    load(tmp_path, dropping, *rows, max_dropped_fraction=0.5)
    printed = capsys.readouterr().out
    assert "train: 2 of 3 rows (1 answer left out in part" in printed


def judge_with(folder, tokenizer: Any, policy_tokenizer: Any) -> tuple[RewardModelFunction, Any]:
    """A reward model with its tokenizer as a judge of a policy, and the policy's config."""
    path = tiny.save(tiny.classifier("llama", vocab_size=len(tokenizer)), folder, tokenizer)
    config = tiny.train_config(max_prompt_length=60, max_completion_length=20)
    return RewardModelFunction(path, policy_tokenizer, config), config


def test_a_judge_reads_messages_without_a_further_bos(tmp_path, chatml):
    judge, _ = judge_with(tmp_path, chatml, chatml)
    prompt_ids, _ = judge.retokenised([[ASKED], "Why?"], [[TWO], " So"], [True, True])
    starts = [chatml.decode(ids)[:12] for ids in prompt_ids]
    assert starts == ["<|im_start|>", "<|bos|>Why?"]


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


@pytest.mark.parametrize("tools", [SCHEMA, json.dumps(SCHEMA)])
def test_tools_and_calls_reach_the_template(tmp_path, chatml, tools: Any):
    tokenizer = tiny.with_template(chatml, TOOLS)
    messages = [{**ASKED, "tool_calls": None}, CALL, TOOL, TWO]  # null: Parquet's, of other rows
    examples = load(tmp_path, tokenizer, {"messages": messages, "tools": tools})
    assert examples[0].prompt.startswith("<tools>add\n<|im_start|>user\nWhy?<|im_end|>\n")
    texts = [chatml.decode(e.completions[0]) for e in examples]
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


def test_tools_that_are_no_json_are_refused(tmp_path, chatml):
    row = {"messages": [ASKED, ONE], "tools": "add"}
    with pytest.raises(UserError) as caught:
        load(tmp_path, chatml, row)
    tiny.check_sentence(caught.value, "the column 'tools' holds 'add', which is no JSON: Expecting")


@pytest.mark.usefixtures("process_group")
def test_a_judge_with_another_template_is_told_of_the_tools(tmp_path, chatml, monkeypatch):
    """By GRPO's rewards and by evaluate.py, which scores the completions of pairs."""
    template = "{{ mood }}" + TOOLS.replace("{{ mood }}", "")
    judge, config = judge_with(tmp_path, tiny.with_template(chatml, template), chatml)
    options = {"tools": SCHEMA, "chat_template_kwargs": {"mood": "Hm. "}}
    read: list[data.PromptGroup] = []
    rewards = lambda groups: read.extend(groups) or [0.0] * sum(len(p.slots) for p in groups)  # noqa: E731
    monkeypatch.setattr(judge, "rewards", rewards)
    columns = {name: [value] for name, value in options.items()}
    judge([[ASKED]], [[TWO]], [[3]], prompt_ids=[[1]], has_stop=[True], **columns)
    pair = {"prompt": [ASKED], "chosen": [ONE], "rejected": [TWO], **options}
    pairs = load(tmp_path, chatml, pair, kind="preference")
    measure.reward_scores(judge, pairs, tiny.vocabulary([chatml.eos_token_id], chatml), config)
    prompts = [chatml.decode(group.prompt_ids) for group in read]
    assert prompts == [prompts[0]] * 2
    assert prompts[0].startswith("Hm. <tools>add\n<|im_start|>user\nWhy?")
