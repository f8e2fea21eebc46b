"""Claim: padding loses nothing and adds nothing.

Every row comes back out of its padded form by its mask alone, whatever the pad id; positions count
real tokens only; a completion ends with its first stop token; a batch pairs each completion with
its own prompt, and reaches a device as it was. About `common.padding` and
`common.batch`.
"""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import batch as batching
from common import padding

TOKENS = st.integers(0, 6)  # few ids, so that the pad id and the stop ids occur in the rows
ROWS = st.lists(st.lists(TOKENS, max_size=6), min_size=1, max_size=5)
FAST = settings(max_examples=150, deadline=None)


@FAST
@given(rows=ROWS, pad_id=TOKENS)
def test_rows_come_back_from_either_side(rows: list[list[int]], pad_id: int):
    for pad in (padding.left_pad, padding.right_pad):
        ids, mask = pad(rows, pad_id)
        assert ids.shape == mask.shape == (len(rows), max(map(len, rows)))
        assert ids.dtype == torch.int64
        assert mask.dtype == torch.bool
        assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == rows
        assert (ids[~mask] == pad_id).all()


@FAST
@given(mask=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_positions_count_real_tokens(mask: list[list[bool]]):
    positions = padding.position_ids(torch.tensor(mask))
    assert positions.dtype == torch.int64
    for row, flags in zip(positions.tolist(), mask, strict=True):
        real = [position for position, flag in zip(row, flags, strict=True) if flag]
        assert real == list(range(len(real)))
        assert all(0 <= position < max(len(real), 1) for position in row), "inside the table"


@FAST
@given(
    rows=st.lists(st.lists(TOKENS, min_size=5, max_size=5), min_size=1, max_size=4),
    stop_ids=st.lists(TOKENS, max_size=3),
)
def test_cut_at_the_first_stop_token(rows: list[list[int]], stop_ids: list[int]):
    mask, has_stop = padding.cut_at_stop(torch.tensor(rows), stop_ids)
    assert mask.dtype == has_stop.dtype == torch.bool
    for row, kept, stopped in zip(rows, mask.tolist(), has_stop, strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), None)
        assert stopped == (end is not None)
        assert kept == [i < (5 if end is None else end) for i in range(5)]


GROUPS = st.integers(1, 3).flatmap(
    lambda size: st.lists(
        st.tuples(
            st.lists(TOKENS, min_size=1, max_size=5),
            st.lists(st.lists(TOKENS, max_size=4), min_size=size, max_size=size),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )
)


@FAST
@given(groups=GROUPS, pad_id=TOKENS)
def test_batch_holds_each_prompt_next_to_its_completions(groups: list, pad_id: int):
    prompts, completions, flags = map(list, zip(*groups, strict=True))
    batch = batching.padded_batch(prompts, completions, pad_id, is_real=flags)
    expected = [
        (prompt, completion, flag)
        for prompt, group, flag in zip(prompts, completions, flags, strict=True)
        for completion in group
    ]
    num_columns = max(len(completion) for _, completion, _ in expected)
    assert batch.input_ids.shape[0] == len(expected)
    assert batch.completion_mask.shape == (len(expected), num_columns)
    assert torch.equal(
        batch.completion_ids, batch.input_ids[:, batch.input_ids.shape[1] - num_columns :]
    )
    for row, (prompt, completion, flag) in enumerate(expected):
        kept = batch.attention_mask[row]
        assert batch.input_ids[row][kept].tolist() == prompt + completion
        assert batch.position_ids[row][kept].tolist() == list(range(len(prompt + completion)))
        counted = batch.completion_ids[row][batch.completion_mask[row]].tolist()
        assert counted == (completion if flag else [])
        assert batch.is_real[row] == flag
        # The prompt is flush with the completion's first column, where scoring looks for it.
        assert kept[: batch.input_ids.shape[1] - num_columns].sum() == len(prompt)
    assert batch.num_tokens == sum(len(c) for _, c, flag in expected if flag)
    assert batch.attention_mask.any(dim=1).all(), "a row without attention would be NaN"


def test_tensors_of_several_dtypes_and_shapes_are_moved_in_one_copy():
    tensors = {
        "flags": torch.tensor([True, False, True]),  # with `more flags` 5 bytes, padded to 8
        "ids": torch.arange(6).view(2, 3),
        "logps": torch.randn(2, 2, 1, generator=torch.Generator().manual_seed(0)),
        "more flags": torch.tensor([[True], [False]]),
        "lengths": torch.tensor([4, 2]),
        "count": torch.tensor(7),
        "nothing": torch.zeros(0, 3),
    }
    with mock.patch.object(batching, "on_device", side_effect=lambda tensor, _: tensor) as copy:
        moved = batching.together_on(tensors, "cuda")  # on whose side they are views of one tensor
    copy.assert_called_once()
    assert moved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(moved[name], tensor, rtol=0, atol=0)


def test_on_the_host_nothing_is_copied():
    tensors = {"ids": torch.arange(3), "flags": torch.tensor([True])}
    for device in ("cpu", torch.device("cpu")):
        moved = batching.together_on(tensors, device)
        assert all(moved[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("make", batching.MAKERS.values())
def test_pairs_of_a_batch_by_hand(make: Callable[..., batching.AnyBatch]):
    prompts = [[1], [2, 3], [4]]
    completions = [[[5], [6, 7]], [[], [8, 9, 9]], [[5, 5], [6]]]  # the second has no chosen token
    batch = make(prompts, completions, 0, is_real=[True, True, False])
    pairs = replace(batch, slots=torch.tensor([8, 9, 4, 5, 0, 0])).pairs
    assert pairs.is_real.tolist() == [True, True, False]
    assert pairs.indices.tolist() == [4, 2, 0]
    assert pairs.lengths.tolist() == [[1, 2], [1, 3], [1, 1]]  # none to divide by is 0
    assert pairs.of(torch.arange(6)).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch.source_rows == [-1] * 6


@pytest.mark.parametrize("make", batching.MAKERS.values())
def test_a_prompt_without_tokens_is_refused(make: Callable[..., batching.AnyBatch]):
    for prompts in ([[], [1]], [[1], []]):
        with pytest.raises(AssertionError, match="at least one token"):
            make(prompts, [[[2]], [[3]]], 0)


def test_the_largest_group_is_that_of_a_prompt_with_all_its_completions():
    for completions, largest in (
        ([[[5], [6, 7]], [[8, 8], [9, 9, 9]]], 5),
        ([[[5, 5, 5, 5], [6]], [[8], [9]]], 5),
        ([[[5], []], [[8], []]], 2),  # which FlashAttention takes for the number of queries
    ):
        layout = batching.shared_prefix_batch([[1], [2, 3]], completions, 0).layout
        assert layout.largest == largest
