"""Claim: rows that a machine's processes share are those that each would have made itself.

What is mapped equals what was tokenised, to the last id, text and column; it is made once per
machine in every run, whatever ran before, and nothing of it is left when the run trains. About
`common.text.shared_rows`.
"""

import copy
import datetime
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import tiny
import torch
from ranks import launch
from tokenizers.processors import TemplateProcessing

from common import data, distributed
from common.errors import UserError
from common.text import shared_rows, tokenise
from common.text.reading import load_examples

EOS = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
POST = "SUBREDDIT: r/pets\n\nTITLE: a cät\n\nPOST: one 喵 two.\nthree {n} four\n\nTL;DR:"
PAIRS: list[dict[str, Any]] = [
    {"prompt": POST.format(n=7), "chosen": " a 🙂", "rejected": " b b", "facts": {"k": [1]}},
    {"prompt": POST.format(n=8), "chosen": f" a{EOS}x", "rejected": " b", "facts": {"q": 0.1}},
    {"prompt": POST.format(n=7), "chosen": " a 🙂", "rejected": " b b"},  # duplicate
    {"prompt": "short", "chosen": " a", "rejected": " a"},  # identical: dropped
    {"prompt": "short", "chosen": EOS, "rejected": " a"},  # empty before its stop: dropped
    {"prompt": f"{EOS}short TL;DR:", "chosen": " one two three four five", "rejected": " c"},
]
PLAIN = [{"completion": row["chosen"], **row} for row in PAIRS]


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


TURNS = [
    {"prompt": turn("user", "Why?"), "completion": turn("assistant", " Because 喵.")},
    {"prompt": turn("user", "Why? " * 30), "completion": turn("assistant", " a")},  # dropped
]


def tokenizer(*, has_bos: bool = False) -> Any:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    if has_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.eos_token_id)]
        )
    return tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def load(tmp_path: Path, rows: list[dict[str, Any]], kind: str = "preference", **fields: Any):
    tiny.write_rows(tmp_path / "train.jsonl", rows)
    limits = {"max_prompt_length": 50, "max_completion_length": 9, "max_dropped_fraction": 0.9}
    its_tokenizer = fields.pop("tokenizer", None) or tokenizer()
    config = tiny.train_config(**(limits | fields))
    vocabulary = tiny.vocabulary(of=its_tokenizer)
    return load_examples(config, str(tmp_path / "train.jsonl"), "train", kind, vocabulary)


@pytest.fixture
def shares(monkeypatch):
    """As the first of two processes, which shares any number of rows."""
    monkeypatch.setattr(distributed, "num_on_host", lambda: 2)
    monkeypatch.setattr(shared_rows, "MIN_ROWS", 1)


@pytest.mark.parametrize("truncation", ["tldr", "start"])
@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("preference", PAIRS), ("sft", PLAIN), ("prompts", PAIRS), ("sft", TURNS)],
)
def test_what_is_mapped_is_what_was_tokenised(
    tmp_path, folder, monkeypatch, capsys, kind, rows, has_bos, truncation
):
    fields = {"tokenizer": tokenizer(has_bos=has_bos), "prompt_truncation": truncation}
    alone = load(tmp_path, rows, kind, **fields)
    assert type(alone) is list
    printed = capsys.readouterr().out
    monkeypatch.setattr(distributed, "num_on_host", lambda: 2)
    monkeypatch.setattr(shared_rows, "MIN_ROWS", 1)
    mapped = load(tmp_path, rows, kind, **fields)
    assert isinstance(mapped, shared_rows.MappedRows)
    assert list(mapped) == alone
    assert capsys.readouterr().out == printed
    assert torch.equal(data.lengths(mapped), data.lengths(alone))
    assert not any(folder.iterdir())
    for example in mapped:
        assert type(example.prompt) is str
        assert {type(i) for i in example.prompt_ids} == {int}
        assert {type(ids) for ids in example.completions} <= {list}


@pytest.mark.usefixtures("shares", "folder")
def test_mapped_rows_are_read_like_a_list(tmp_path):
    examples = load(tmp_path, PAIRS)
    rows = [0, 1, 2, 5]
    assert [example.row for example in examples] == rows
    assert [example.row for example in examples[1:-1]] == rows[1:-1]
    assert examples[-1] == examples[3]
    with pytest.raises(IndexError):
        examples[4]


@pytest.mark.usefixtures("shares", "folder")
def test_rows_are_those_of_today(tmp_path):
    """Of the same name and size, and in the same second."""
    first, second = (load(tmp_path, [{**PAIRS[0], "chosen": f" {c}"}]) for c in "ab")
    assert first[0].completions != second[0].completions


@pytest.mark.usefixtures("shares")
def test_too_many_dropped_rows_are_refused_and_leave_nothing(tmp_path, folder):
    with pytest.raises(UserError, match="would lose 2 of 6 rows"):
        load(tmp_path, PAIRS, max_dropped_fraction=0.3)
    assert not any(folder.iterdir())


@pytest.mark.usefixtures("shares", "folder")
def test_columns_that_json_cannot_hold_stay_in_memory(tmp_path):
    table = pyarrow.table({"prompt": ["p"], "when": pyarrow.array([0], pyarrow.date32())})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    vocabulary = tiny.vocabulary(of=tokenizer())
    (example,) = load_examples(tiny.train_config(), str(tmp_path), "train", "prompts", vocabulary)
    assert example.columns == {"when": datetime.date(1970, 1, 1)}


def loaded(rows_in: str, temporary: str) -> list[Any]:
    """What this rank loads, and how often it tokenised: many rows, then few."""
    tempfile.tempdir = temporary
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as torchrun has it
    distributed.start()
    calls = []
    tokenize_rows = tokenise.tokenize_rows

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return tokenize_rows(*args, **kwargs)

    found: list[Any] = []
    with mock.patch.object(tokenise, "tokenize_rows", spy):
        for num_rows in (0, 10):
            config = tiny.train_config(max_prompt_length=60)
            vocabulary = tiny.vocabulary()
            examples = load_examples(config, rows_in, "train", "preference", vocabulary, num_rows)
            rows = [[e.row, e.prompt, e.prompt_ids, e.completions, e.columns] for e in examples]
            found.append([len(calls), type(examples).__name__, rows])
            calls.clear()
    return found


def test_one_process_of_a_machine_makes_the_rows_of_all(tmp_path, folder):
    rows = [{"prompt": f"word {n}", "chosen": " a", "rejected": " b"} for n in range(1000)]
    tiny.write_rows(tmp_path / "train.jsonl", rows)
    ranks = launch(loaded, 2, tmp_path, rows_in=str(tmp_path), temporary=str(folder))
    (many, few), (other_many, other_few) = ranks
    assert (many[0], other_many[0], few[0], other_few[0]) == (1, 0, 1, 1)
    assert many[1:] == other_many[1:] == ["MappedRows", many[2]]
    assert few[1:] == other_few[1:] == ["list", many[2][:10]]
    assert [row for row, *_ in many[2]] == list(range(1000))
    assert not any(folder.iterdir())
