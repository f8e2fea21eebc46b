"""Claim: what holds for the rows and files of the other tests holds for any.

Drawn by hypothesis: no cut is too long, and any file is read or refused in one sentence. About
`common.text.reading`.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.text.data_report import refuse_lossy
from common.text.reading import load_examples, load_rows
from common.text.schemas import COMPLETION_COLUMNS, Row, is_messages
from common.text.tokenise import tokenize_rows

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("properties")


EOS = "<|endoftext|>"
WORDS = st.sampled_from(["a", "word", "end.", "naïve", "喵喵", "🙂", "supercalifragilistic", EOS])
SPACES = st.sampled_from([" ", " ", "\n", "\n\n", "\t", "\u2028"])
BODIES = st.lists(st.tuples(WORDS, SPACES).map("".join), min_size=1, max_size=30).map("".join)
PROMPTS = st.one_of(
    st.tuples(st.just("SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: "), BODIES, st.just("\n\nTL;DR:")),
    st.tuples(st.just("TITLE: b\n\n"), BODIES, st.sampled_from(["\n\nTL;DR:", ""])),
    st.tuples(st.text(max_size=60), BODIES),
).map("".join)


@settings(max_examples=150)
@given(
    texts=st.lists(st.tuples(PROMPTS, BODIES | st.text(max_size=60)), min_size=1, max_size=4),
    max_prompt_length=st.integers(1, 60),
    max_completion_length=st.integers(1, 30),
    truncation=st.sampled_from(["tldr", "start"]),
)
def test_nothing_is_longer_than_allowed_or_lost_without_being_counted(
    texts, max_prompt_length, max_completion_length, truncation
):
    tokenizer = tiny.tokenizer()
    stop_id = tokenizer.eos_token_id
    rows = [Row(prompt, [text], number=i) for i, (prompt, text) in enumerate(texts)]
    config = tiny.train_config(
        max_prompt_length=max_prompt_length,
        max_completion_length=max_completion_length,
        prompt_truncation=truncation,
    )
    tokenised = tokenize_rows(rows, tiny.vocabulary([stop_id]), config)
    try:
        refuse_lossy(tokenised, "train", 1.0)
    except UserError as error:
        tiny.check_sentence(error, f"would lose {len(rows)} of {len(rows)} rows")
        return
    assert len(tokenised) == len(rows)
    for example in [row.example for row in tokenised if not row.drop_reason]:
        prompt, text = texts[example.row]
        assert 1 <= len(example.prompt_ids) <= max_prompt_length
        assert tokenizer(example.prompt, add_special_tokens=False)["input_ids"] == (
            example.prompt_ids
        ) or (truncation == "start" and example.prompt != prompt)  # a cut inside a character
        (ids,) = example.completions
        assert 1 <= len(ids) <= max_completion_length
        assert stop_id not in ids[:-1]
        if ids[-1] == stop_id:
            assert tokenizer.decode(ids[:-1]) == text.split(EOS)[0]
        else:
            assert len(ids) == max_completion_length


TEXTS = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    ["a", "a b", "\ud83d", "x \udc00 y"]  # halves of surrogate pairs
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]) | TEXTS, "content": TEXTS}
    )
    | st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt"]) | JSON, "value": TEXTS}),
    max_size=3,
)
COLUMNS = (
    *("prompt", "completion", "chosen", "rejected", "messages", "completions", "n"),
    *("conversations", "instruction", "input", "output", "text"),
)
GOOD_TEXTS = {"prompt": "a b", "completion": " c", "chosen": " c", "rejected": " d"}
GOOD_MESSAGES = {
    name: [{"role": "user" if name == "prompt" else "assistant", "content": text}]
    for name, text in GOOD_TEXTS.items()
}
ROWS = st.lists(  # good ones, but for a column or two
    st.tuples(
        st.sampled_from([GOOD_TEXTS, GOOD_MESSAGES, {}]),
        st.dictionaries(st.sampled_from(COLUMNS), TEXTS | MESSAGES | JSON, max_size=2),
    ).map(lambda pair: pair[0] | pair[1]),
    max_size=3,
)
KINDS = st.sampled_from(list(COMPLETION_COLUMNS))


def assert_read_or_refused(file: Path, kind: Any) -> None:
    """By a stage: read, rendered, tokenised. Text that passes is text."""
    config = tiny.train_config(max_completion_length=8, max_dropped_fraction=1)
    try:
        rows = load_rows(tiny.train_config(), str(file), "train", kind)
        examples = load_examples(config, str(file), "train", kind, tiny.vocabulary())
    except UserError as error:
        tiny.check_sentence(error)
        return
    for row in rows:
        values = [row[name] for name in ("prompt", *COMPLETION_COLUMNS[kind])]
        assert all(is_messages(value) for value in values) or all(
            isinstance(value, str) for value in values
        )
        json.dumps(values, ensure_ascii=False).encode()  # no half of a surrogate pair
    for example in examples:
        values = [rows[example.row][name] for name in ("prompt", *COMPLETION_COLUMNS[kind])]
        assert all(is_messages(v) or v.strip() for v in values)


@settings(max_examples=200)
@given(rows=ROWS, kind=KINDS)
def test_any_rows_are_read_or_refused(folder, rows, kind):
    assert_read_or_refused(tiny.write_rows(folder / "rows.jsonl", rows), kind)


@settings(max_examples=150)
@given(
    content=st.binary(max_size=80) | st.text(max_size=40).map(str.encode) | JSON.map(json.dumps),
    suffix=st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".parquet"]),
    is_packed=st.booleans(),
)
def test_any_file_is_read_or_refused(folder, content, suffix, is_packed):
    file = folder / f"file{suffix}"
    content = content if isinstance(content, bytes) else content.encode()
    file.write_bytes(gzip.compress(content) if is_packed else content)
    assert_read_or_refused(file, "prompts")
