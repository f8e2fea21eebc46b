"""Claim: a cache of reference log-probabilities changes how long a run takes and nothing else.

Whatever could change a number is another file; what cannot be read is computed again, and said so;
what a file lacks is added to it.
"""

import copy
import dataclasses
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from common.data import Example
from common.pairs import reference
from common.pairs.config import DPOConfig
from common.text import checked_file

pytestmark = pytest.mark.usefixtures("process_group")
EXAMPLES = tiny.ragged_examples([(6, 4, 2), (3, 2, 5), (9, 3, 3)])


@pytest.fixture(autouse=True)
def _warnings_of_this_test_only():
    checked_file._warn_once.cache_clear()


def name(
    lm: Any = None,
    examples: Sequence[Example] = EXAMPLES,
    tokenizer: Any = None,
    ld_alpha: float = 1.0,
    **fields: Any,
) -> str:
    weights = reference.weights_digest(lm or tiny.causal_lm("gpt2"))
    unused = {"output_dir": "unused", "model_name_or_path": "unused"}
    config = DPOConfig(ref_cache_dir="cache", **unused | fields)
    file = reference.cache_file(
        weights, examples, tokenizer or tiny.tokenizer(), config, ld_alpha=ld_alpha
    )
    assert file.parent == Path("cache")
    return file.name


def nudged_weight() -> Any:
    lm = tiny.causal_lm("gpt2")
    with torch.no_grad():
        lm.transformer.h[1].mlp.c_fc.weight[3, 5] += 2.0**-20
    return lm


def other_activation() -> Any:
    lm = tiny.causal_lm("gpt2")
    lm.config.activation_function = "relu"  # the same weights, another model
    return lm


def changed(row: int, **fields: Any) -> list[Example]:
    return [
        dataclasses.replace(example, **(fields if i == row else {}))
        for i, example in enumerate(EXAMPLES)
    ]


def other_tokenizer() -> Any:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_tokens(["zebra"])
    return tokenizer


MOVED = [*EXAMPLES[0].prompt_ids, EXAMPLES[0].completions[0][0]]  # a token from there to here
CHANGES = {
    "a weight": lambda: name(nudged_weight()),
    "the activation": lambda: name(other_activation()),
    "a prompt": lambda: name(examples=changed(1, prompt_ids=[1, 2, 4])),
    "a completion": lambda: name(examples=changed(2, completions=[[1, 0], [2, 3, 0]])),
    "chosen and rejected": lambda: name(
        examples=changed(0, completions=EXAMPLES[0].completions[::-1])
    ),
    "where a prompt ends": lambda: name(
        examples=changed(
            0,
            prompt_ids=MOVED,
            completions=[EXAMPLES[0].completions[0][1:], EXAMPLES[0].completions[1]],
        )
    ),
    "the order of rows": lambda: name(examples=EXAMPLES[::-1]),
    "a row less": lambda: name(examples=EXAMPLES[:2]),
    "the tokenizer": lambda: name(tokenizer=other_tokenizer()),
    "prompt truncation": lambda: name(prompt_truncation="start"),
    "prompt length": lambda: name(max_prompt_length=500),
    "completion length": lambda: name(max_completion_length=55),
    "the dtype": lambda: name(bf16=True),
    "the weight of tails": lambda: name(ld_alpha=0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_could_change_a_number_is_another_file(change):
    assert CHANGES[change]() != name()


SAME = {
    "the layout": {"layout": "padded"},
    "micro-batches": {"micro_batch_size": 1, "micro_batch_tokens": 100},
    "seed and steps": {"seed": 5, "max_steps": 7, "batch_size": 2},
    "training": {"learning_rate": 1.0, "output_dir": "elsewhere"},
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_number_is_the_same_file(change):
    assert name(**SAME[change]) == name()


def test_a_model_that_is_read_from_another_place_is_the_same(tmp_path):
    lm = tiny.causal_lm("gpt2", is_plain=True)
    lm.save_pretrained(tmp_path / "a")
    again = type(lm).from_pretrained(tmp_path / "a")
    moved = type(lm).from_pretrained((tmp_path / "a").rename(tmp_path / "b"))
    assert reference.weights_digest(again) == reference.weights_digest(moved)


class Scorer:
    """Numbers that tell their row, and which rows were asked for."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, rows: Sequence[int]) -> Tensor:
        self.calls.append(list(rows))
        result = torch.full((4, 2), torch.nan, dtype=torch.float64)
        for row in rows:
            result[row] = torch.tensor([-row - 0.1, -row - 0.2], dtype=torch.float64)
        return result


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "name.logps"


def test_what_a_file_has_is_not_computed_and_what_it_lacks_is_added(file, capsys):
    score = Scorer()
    first = reference.complete(file, 4, [0, 2], score)
    assert torch.equal(first.isnan().any(1), torch.tensor([False, True, False, True]))
    assert "from" not in capsys.readouterr().out
    second = reference.complete(file, 4, [0, 1, 2], score)
    third = reference.complete(file, 4, [1, 2], score)
    assert f"of 2 pairs from {file}" in capsys.readouterr().out
    assert score.calls == [[0, 2], [1]]
    expected = Scorer()([0, 1, 2])
    for found in (second, third):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_without_a_file_every_call_computes():
    score = Scorer()
    for _ in range(2):
        reference.complete(None, 4, [3], score)
    assert score.calls == [[3], [3]]


def flipped(content: bytes) -> bytes:
    """One bit of a number."""
    number = struct.pack("<d", -0.1)
    return content.replace(number, bytes([number[0] ^ 1]) + number[1:], 1)


DAMAGES = {
    "a flipped bit": flipped,
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "something else": lambda content: b"text" * 40,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_computed_again_and_said_so(file, capsys, damage):
    score = Scorer()
    expected = reference.complete(file, 4, [0, 1], score)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    found = reference.complete(file, 4, [0, 1], score)
    assert f"warning: {file} is damaged" in capsys.readouterr().out
    assert score.calls == [[0, 1], [0, 1]]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    reference.complete(file, 4, [0, 1], score)  # it was written anew
    assert len(score.calls) == 2
    assert list(file.parent.iterdir()) == [file]


def test_any_flipped_bit_is_found(file, capsys):
    reference.complete(file, 4, [0], Scorer())
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
        assert reference.read(file) is None
    assert capsys.readouterr().out.count("is damaged") == len(content)


def test_runs_that_write_the_same_file_at_once_do_not_meet(file, capsys, monkeypatch):
    numbers = Scorer()([0, 1])
    replace = Path.replace

    def one_more_writes_first(unfinished: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        reference.write(file, numbers)
        return replace(unfinished, target)

    monkeypatch.setattr(Path, "replace", one_more_writes_first)
    reference.write(file, numbers)
    assert capsys.readouterr().out == ""
    torch.testing.assert_close(reference.read(file), numbers, rtol=0, atol=0, equal_nan=True)


def test_a_file_under_another_name_is_not_taken_for_it(file):
    score = Scorer()
    reference.complete(file, 4, [0], score)
    other = file.rename(file.with_name("other.logps"))
    reference.complete(other, 4, [0], score)
    assert score.calls == [[0], [0]]


def test_a_folder_that_cannot_be_made_is_warned_about_once(tmp_path, capsys):
    (tmp_path / "cache").write_text("a file")
    score = Scorer()
    for row in (0, 1):
        file = tmp_path / "cache" / f"{row}.logps"
        assert not reference.complete(file, 4, [row], score)[row].isnan().any()
    assert capsys.readouterr().out.count("warning: reference log-probabilities are not kept") == 1
