"""Claim: a row of each of TRL's schemas is read by its stages, or refused with a way out.

The rows are those of its page on dataset formats; what a stage reads of them is written out by
hand. Those of ShareGPT, Alpaca and plain text are refused with the page that has a `map` for each.
Rows with a blank or null cell are dropped, counted and named; columns may have other names. About
`common.text.schemas`.
"""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny

from common import distributed
from common.errors import UserError
from common.text.reading import load_examples

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
ASKED = [{"role": "user", "content": "What color is the sky?"}]
BLUE, GREEN = ([{"role": "assistant", "content": f"It is {c}."}] for c in ("blue", "green"))
CALLS = [
    *ASKED,
    {"role": "assistant", "content": "look()"},
    {"role": "tool", "content": "blue"},
    *BLUE,
]
SHARE_GPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "What color is the sky?"},
    {"from": "gpt", "value": "It is blue."},
]
INSTRUCTION = {"instruction": "Name the sky's color.", "input": "A clear day", "output": "Blue."}
IMPLICIT = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "The sky is blue."},
    "messages": {"messages": ASKED + BLUE},
    "conversations": {"conversations": SHARE_GPT},
    "other names": {"messages": SHARE_GPT},
    "other roles": {"messages": CALLS},
    "parts": {"messages": [{"role": "user", "content": [{"type": "image", "text": "So?"}]}]},
    "text parts": {
        "messages": [
            {
                **m,
                "content": [{"type": "text", "text": m["content"][:4], "image": None}]
                + [{"type": "text", "text": m["content"][4:]}],
            }
            for m in ASKED + BLUE
        ]
    },
    "alpaca": INSTRUCTION,
    "dolly": {"instruction": "Name its color.", "context": "The sky", "response": "Blue."},
    "prompt": {"prompt": "The sky is"},
    "chat prompt": {"prompt": ASKED},
    "completion": {"prompt": "The sky is", "completion": " blue."},
    "chat completion": {"prompt": ASKED, "completion": BLUE},
    "pair": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "implicit pair": IMPLICIT,
    "chat pair": {"prompt": ASKED, "chosen": BLUE, "rejected": GREEN},
    "implicit chat pair": {"chosen": ASKED + BLUE, "rejected": ASKED + GREEN},
    "alpaca pair": {**INSTRUCTION, "chosen": "Blue.", "rejected": "Green."},
    "conversations in other words": {"conversations": ASKED + BLUE},
    "question beside": {"question": "Its color?", **IMPLICIT},
    "messages beside": {"messages": ASKED + BLUE, **IMPLICIT},
    "conversations beside": {"conversations": SHARE_GPT, **IMPLICIT},
    "UltraFeedback": {
        "prompt": ASKED[0]["content"],
        "messages": [*ASKED, *GREEN, *ASKED, *BLUE],
        "chosen": ASKED + BLUE,
        "rejected": ASKED + GREEN,
    },
    "unpaired": {"prompt": "The sky is", "completion": " blue.", "label": True},
    "stepwise": {
        "prompt": "Which number is larger, 9.8 or 9.11?",
        "completions": ["The fractional part of 9.8 is 0.8.", "Hence, 9.11 > 9.8."],
        "labels": [True, False],
    },
}
END = "<|im_end|>"
QUESTION = f"<|im_start|>user\nWhat color is the sky?{END}\n<|im_start|>assistant\n"
BRIEF = f"<|im_start|>system\nBe brief.{END}\n{QUESTION}"
CALLED = f"{END}\n<|im_start|>tool\nblue{END}\n<|im_start|>assistant\n"
CHOSEN = "--column_map completion=chosen takes those; docs/data.md has"
QUESTION_IS = "--column_map prompt=NAME takes another one; docs/data.md has"
DOCS = "docs/data.md has the rows that each stage reads, and a short `map` for others"
# By the schema: what SFT, the stages with pairs, and GRPO read: a prompt with its completions, each
# with the stop token; or what they say. One that is not here is refused by all of them.
READ: dict[str, tuple[tuple[str, ...] | str, tuple[str, ...] | str, tuple[str, ...] | str]] = {
    "messages": ((QUESTION, "It is blue."), DOCS, (QUESTION,)),
    "other roles": (
        (f"{QUESTION}look(){CALLED}", "It is blue."),
        DOCS,
        (f"{QUESTION}look(){CALLED}",),
    ),
    "parts": (f"part of type 'image', and only parts of type 'text' are read; {DOCS}",) * 3,
    "text parts": ((QUESTION, "It is blue."), DOCS, (QUESTION,)),
    "prompt": (DOCS, DOCS, ("The sky is",)),
    "chat prompt": (DOCS, DOCS, (QUESTION,)),
    "completion": (("The sky is", " blue."), DOCS, ("The sky is",)),
    "chat completion": ((QUESTION, "It is blue."), DOCS, (QUESTION,)),
    "pair": (DOCS, ("The sky is", " blue.", " green."), ("The sky is",)),
    "implicit pair": (CHOSEN, ("The sky is", " blue.", " green."), ("The sky is",)),
    "alpaca pair": (CHOSEN, *(QUESTION_IS,) * 2),
    "question beside": (CHOSEN, *(QUESTION_IS,) * 2),
    "messages beside": (
        (QUESTION, "It is blue."),
        QUESTION_IS,
        (QUESTION,),
    ),
    "conversations beside": (CHOSEN, *(QUESTION_IS,) * 2),
    "chat pair": (CHOSEN, (QUESTION, "It is blue.", "It is green."), (QUESTION,)),
    "implicit chat pair": (CHOSEN, (QUESTION, "It is blue.", "It is green."), (QUESTION,)),
    "UltraFeedback": (
        (f"{QUESTION}It is green.{END}\n{QUESTION}", "It is blue."),
        (QUESTION, "It is blue.", "It is green."),
        (QUESTION,),
    ),
    "unpaired": (("The sky is", " blue."), DOCS, ("The sky is",)),
    "stepwise": (DOCS, DOCS, ("Which number is larger, 9.8 or 9.11?",)),
}
KINDS = ("sft", "preference", "prompts")


@pytest.fixture(scope="module")
def tokenizer():
    """One whose turns end in its eos; it has no bos."""
    tokenizer = tiny.chatml_tokenizer()
    tokenizer.bos_token = None
    return tokenizer


def read(tmp_path, tokenizer, kind, rows, **flags):
    """The examples that a stage makes of rows, which are those of its main data set."""
    name = str(tiny.write_rows(tmp_path / "train.jsonl", rows))
    config = tiny.train_config(max_prompt_length=200, dataset_name=name, **flags)
    vocabulary = tiny.vocabulary([tokenizer.eos_token_id], tokenizer)
    return load_examples(config, name, "train", kind, vocabulary)


def texts(example, tokenizer):
    ids = (example.prompt_ids, *example.completions)
    return tuple(map(tokenizer.decode, ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schema", ROWS)
def test_each_schema_is_read_or_refused_with_a_way_out(tmp_path, tokenizer, schema, kind):
    expected = READ.get(schema, (DOCS,) * 3)[KINDS.index(kind)]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=r"row 1: column '\w+' .*\.$") as caught:
            read(tmp_path, tokenizer, kind, [ROWS[schema]])
        assert expected in str(caught.value)
        return
    *earlier, example = read(tmp_path, tokenizer, kind, [ROWS[schema]])
    assert texts(example, tokenizer) == (expected[0], *(text + END for text in expected[1:]))
    if earlier:  # of a conversation's answers the last is written out above
        first = {"other roles": "look()", "UltraFeedback": "It is green."}[schema]
        assert [texts(e, tokenizer) for e in earlier] == [(QUESTION, first + END)]
    assert bool(earlier) == (kind == "sft" and schema in ("other roles", "UltraFeedback"))


@pytest.mark.parametrize("kind", ["sft", "prompts"])
@pytest.mark.parametrize(
    "schema",
    [
        "pair",
        "implicit pair",
        "chat pair",
        "implicit chat pair",
        "UltraFeedback",
    ],
)
def test_the_chosen_answer_is_trained_behind_the_prompt_of_the_pair(
    tmp_path, tokenizer, kind, schema
):
    """What `--column_map completion=chosen` trains is the first completion of the pair."""
    (pair,) = read(tmp_path, tokenizer, "preference", [ROWS[schema]])
    column_map = ["completion=chosen"] if kind == "sft" else []
    (example,) = read(tmp_path, tokenizer, kind, [ROWS[schema]], column_map=column_map)
    assert texts(example, tokenizer) == texts(pair, tokenizer)[: 1 + len(column_map)]
    assert example.messages == pair.messages
    if kind == "prompts":  # reward functions get the columns as the file has them
        assert example.columns == {k: v for k, v in ROWS[schema].items() if k != "prompt"}


@pytest.mark.parametrize(("kind", "column_map"), [("sft", ["completion=chosen"]), ("prompts", [])])
@pytest.mark.parametrize("other", [None, "The sky is blue."])
def test_a_null_or_equal_pair_without_a_prompt_is_dropped(
    tmp_path, tokenizer, kind, column_map, other
):
    rows = [IMPLICIT, {"chosen": "The sky is blue.", "rejected": other}]
    flags = {"column_map": column_map, "max_dropped_fraction": 0.5}
    assert [example.row for example in read(tmp_path, tokenizer, kind, rows, **flags)] == [0]


@pytest.mark.parametrize("text", ["Be brief.", "", None])
@pytest.mark.parametrize("first", ["user", "system"])
def test_a_system_message_in_a_column_is_said_to_be_unread(
    tmp_path, tokenizer, capsys, text, first
):
    messages = [{"role": first, "content": "Hi"}, {"role": "user", "content": "What is it?"}]
    row = {"prompt": messages, "system": text}
    read(tmp_path, tokenizer, "prompts", [row, row, {"prompt": messages}])
    is_unread = "the column 'system' of 2 rows is not read" in capsys.readouterr().out
    assert is_unread == (text == "Be brief." and first == "user")


@pytest.mark.parametrize("schema", ["pair", "implicit pair", "chat pair", "implicit chat pair"])
def test_an_identical_pair_is_counted_as_one_in_each_schema(tmp_path, tokenizer, capsys, schema):
    rows = [ROWS[schema]] * 3 + [{**ROWS[schema], "rejected": ROWS[schema]["chosen"]}]
    assert [e.row for e in read(tmp_path, tokenizer, "preference", rows)] == [0, 1, 2]
    assert "3 of 4 rows (1 identical pair; the first is row 4)" in capsys.readouterr().out


def test_an_answer_is_no_part_of_a_prompt_to_sample_from(tmp_path, tokenizer):
    row = ROWS["implicit chat pair"]
    with pytest.raises(UserError, match="'prompt' ends with an answer of the assistant; leave it"):
        read(tmp_path, tokenizer, "prompts", [row], column_map=["prompt=chosen"])


def test_bars_count_the_rows_while_they_are_read_rendered_and_tokenised(
    tmp_path, tokenizer, monkeypatch
):
    bars = []

    def bar(title, total, *, unit, items):
        found = list(items)
        bars.append((title, total, len(found)))
        assert unit == "row"
        return found

    monkeypatch.setattr(distributed, "progress_bar", bar)
    read(tmp_path, tokenizer, "sft", [ROWS["messages"]] * 3)
    assert bars == [("reading", None, 3), ("rendering", 3, 3), ("tokenising", 3, 3)]


# ---- blank and null cells ------------------------------------------------------------------------

PAIR, CHAT = ROWS["pair"], ROWS["chat pair"]


@pytest.mark.parametrize(
    ("kind", "good", "bad", "column"),
    [
        ("preference", PAIR, {**PAIR, "chosen": None}, "chosen"),
        ("preference", PAIR, {**PAIR, "rejected": " \n"}, "rejected"),
        ("preference", PAIR, {**PAIR, "prompt": None}, "prompt"),
        ("sft", ROWS["completion"], {**ROWS["completion"], "completion": ""}, "completion"),
        ("preference", CHAT, {**CHAT, "prompt": None}, "prompt"),
        ("preference", CHAT, {**CHAT, "prompt": [{**ASKED[0], "content": " \n"}]}, "prompt"),
        ("preference", CHAT, {**CHAT, "chosen": [{**BLUE[0], "content": ""}]}, "chosen"),
        ("preference", CHAT, {**CHAT, "chosen": [{**BLUE[0], "content": None}]}, "chosen"),
        ("preference", ROWS["implicit pair"], {"chosen": None, "rejected": "The"}, "chosen"),
        (
            "preference",
            ROWS["implicit chat pair"],
            {"chosen": ASKED + BLUE, "rejected": None},
            "rejected",
        ),
        ("sft", ROWS["messages"], {"messages": None}, "completion"),
        ("sft", ROWS["messages"], {"messages": []}, "completion"),
        ("sft", ROWS["messages"], {"messages": ASKED}, "completion"),  # nobody answers
        ("sft", ROWS["messages"], {"messages": BLUE}, "completion"),  # nobody asks
        (
            "sft",
            ROWS["messages"],
            {"messages": [*ASKED, {**BLUE[0], "content": " "}]},
            "completion",
        ),
        ("preference", CHAT, {"chosen": BLUE, "rejected": GREEN}, "prompt"),
        ("preference", IMPLICIT, {"chosen": "Blue.", "rejected": "Green."}, "prompt"),
        ("prompts", ROWS["prompt"], {"prompt": None}, "prompt"),
        ("prompts", ROWS["messages"], {"messages": None}, "prompt"),
        ("prompts", IMPLICIT, {"chosen": None, "rejected": "The"}, "prompt"),
    ],
)
def test_a_blank_or_null_cell_drops_its_row(tmp_path, tokenizer, capsys, kind, good, bad, column):
    rows = [good, {**good, "n": 1}, bad, good, bad, good]
    examples = read(tmp_path, tokenizer, kind, rows, max_dropped_fraction=0.4)
    assert [example.row for example in examples] == [0, 1, 3, 5]
    reason = "empty completion" if column in ("chosen", "rejected", "completion") else "empty or no"
    assert f"train: 4 of 6 rows (2 {reason}" in (output := capsys.readouterr().out)
    assert "; the first is row 3), truncated" in output
    with pytest.raises(UserError, match=r"lose 2 of 6 rows \(2 empty .*; the first is row 3\)"):
        read(tmp_path, tokenizer, kind, rows, max_dropped_fraction=0.3)
    with pytest.raises(UserError, match="lose 1 of 1 rows"):
        read(tmp_path, tokenizer, kind, [bad])


def test_texts_that_all_repeat_their_prompt_are_cut_beside_a_blank_one(tmp_path, tokenizer):
    repeating = {"prompt": "The sky is", "completion": "The sky is blue."}
    rows = [repeating, {**repeating, "completion": None}]
    (example,) = read(tmp_path, tokenizer, "sft", rows, max_dropped_fraction=0.5)
    assert texts(example, tokenizer) == ("The sky is", " blue." + END)


# ---- other names for columns ---------------------------------------------------------------------

QUESTIONS = [{"question": "The sky is", "answer": " blue.", "solution": "x"}]


def test_columns_get_other_names(tmp_path, tokenizer):
    flags = {"column_map": ["prompt=question", "completion=answer", "gold=solution"]}
    (example,) = read(tmp_path, tokenizer, "sft", QUESTIONS, **flags)
    assert texts(example, tokenizer) == ("The sky is", " blue." + END)
    assert example.columns == {"gold": "x"}
    swapped = {"column_map": ["chosen=rejected", "rejected=chosen"]}
    (example,) = read(tmp_path, tokenizer, "preference", [PAIR], **swapped)
    assert texts(example, tokenizer) == ("The sky is", " green." + END, " blue." + END)


def test_a_run_reads_pairs_as_such_and_their_chosen_answers_for_sft(tmp_path, tokenizer):
    """As a reward model does whose `--sft_dataset_name` is its pairs."""
    flags = {"column_map": ["completion=chosen"]}
    (pair,) = read(tmp_path, tokenizer, "preference", [PAIR], **flags)
    (row,) = read(tmp_path, tokenizer, "sft", [PAIR], **flags)
    assert texts(pair, tokenizer) == ("The sky is", " blue." + END, " green." + END)
    assert texts(row, tokenizer) == texts(pair, tokenizer)[:2]


@pytest.mark.parametrize(
    ("column_map", "told"),
    [
        (["prompt=query"], "no column 'query', it has: 'question', 'answer', 'solution'."),
        (["question=answer"], "a column 'question', which that would replace"),
        (["prompt"], "it must be pairs NEW=OLD"),
        (["prompt="], "it must be pairs NEW=OLD"),
    ],
)
def test_a_column_map_that_cannot_be_is_refused(tmp_path, tokenizer, column_map, told):
    with pytest.raises(UserError) as caught:
        read(tmp_path, tokenizer, "sft", QUESTIONS, column_map=column_map)
    assert told in str(caught.value)


def test_a_further_data_set_need_not_have_every_column_of_the_map(tmp_path, tokenizer):
    (tmp_path / "prompts.jsonl").write_text('{"question": "The sky is"}\n')
    config = tiny.train_config(
        dataset_name="pairs", column_map=["prompt=question", "chosen=better"]
    )
    vocabulary = tiny.vocabulary([tokenizer.eos_token_id], tokenizer)
    file = str(tmp_path / "prompts.jsonl")
    (example,) = load_examples(config, file, "train", "prompts", vocabulary)
    assert example.prompt == "The sky is"


@pytest.mark.parametrize(
    ("schema", "title", "expected"),
    [
        ("conversations", "ShareGPT", (BRIEF, "It is blue." + END)),
        ("alpaca", "Alpaca", ("Name the sky's color.\n\nA clear day\n\n", "Blue." + END)),
        ("text", "Plain text", ("The", " sky is blue." + END)),
    ],
)
def test_the_maps_of_the_page_make_rows_that_are_read(
    tmp_path, tokenizer, monkeypatch, schema, title, expected
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps([ROWS[schema]]))
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    head, *parts = code.split("\n# ")
    (part,) = (part for part in parts if part.startswith(title))
    exec(f"{head}\n# {part}", {})
    rows = [json.loads(line) for line in (tmp_path / "data/mine/train.jsonl").open()]
    (example,) = read(tmp_path, tokenizer, "sft", rows)
    assert texts(example, tokenizer) == expected
