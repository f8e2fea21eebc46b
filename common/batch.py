"""Batches of completions with their prompts, in two layouts, and their way to a device.

`shared_prefix`, the default: one row without padding, every prompt once. `padded`: a row for each
completion. A row of the first, of two prompts with two completions each, drawn by what a token is:

    column      0  1  2  3  4  5  6  7  8
    token       p  p  q  a  a  b  c  d  d     prompts p and q; a, b continue p, and c, d continue q
    position    0  1  0  2  3  2  1  1  2     a completion goes on where its prompt ends

>>> batch = shared_prefix_batch([[7, 7], [8]], [[[1, 1], [2]], [[3], [4, 4]]], pad_id=0)
>>> batch.input_ids.tolist()
[[7, 7, 8, 1, 1, 2, 3, 4, 4]]
>>> batch.position_ids.tolist()
[[0, 1, 0, 2, 3, 2, 1, 1, 2]]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from common.padding import left_pad, numbers, position_ids, right_pad


def on_device(tensor: Any, device: torch.device | str) -> Any:
    """Move a tensor, or an object with a method `to`, to a device without a wait of the host."""
    is_here = isinstance(tensor, Tensor) and tensor.device.type == "cpu"
    if is_here and torch.device(device).type not in ("cpu", "meta"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def together_on(tensors: dict[str, Tensor], device: torch.device | str) -> dict[str, Any]:
    """Move tensors of the host to a device, in one copy and without a wait of the host."""
    are_there = any(tensor.device.type != "cpu" for tensor in tensors.values())
    if are_there or torch.device(device).type in ("cpu", "meta"):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    names = {t.dtype: [n for n in tensors if tensors[n].dtype == t.dtype] for t in tensors.values()}
    arrays = [np.concatenate([tensors[n].numpy().ravel() for n in names[dtype]]) for dtype in names]
    buffers = [array.view(np.uint8) for array in arrays]
    buffers = [np.pad(b, (0, -len(b) % 8)) for b in buffers]  # views begin at multiples of 8
    moved = on_device(torch.from_numpy(np.concatenate(buffers)), device)
    on_it = {}
    for dtype, buffer in zip(names, moved.split([*map(len, buffers)]), strict=True):
        values, sizes = buffer.view(dtype), [tensors[name].numel() for name in names[dtype]]
        pieces = values.split([*sizes, len(values) - sum(sizes)])
        for name, piece in zip(names[dtype], pieces, strict=False):
            shape = tensors[name].shape
            on_it[name] = piece if len(shape) == 1 else piece.view(shape)
    return on_it


@dataclass
class _EitherBatch:
    """Fields and methods of a batch of B completions in either layout."""

    completion_mask: Tensor  # (B, C) bool, True = the token counts in the loss; False if not real
    is_real: Tensor  # (B,) bool, False = a row that only keeps the ranks in step, without weight
    slots: Tensor  # (B,) int64, each completion's index in the caller's tensors; 0 if not real
    source_rows: list[int]  # B indices of the rows read that the prompts came from, or -1

    @property
    def pairs(self) -> "Pairs":
        """The completions as pairs, of a batch with two for each prompt."""
        return Pairs(self)

    @property
    def num_tokens(self) -> Tensor:
        """Number of tokens that count in the loss, an int64 scalar that stays on the device."""
        return self.completion_mask.sum()

    def to(self, device: torch.device | str) -> Self:
        """Copy from the host to a device."""
        return replace(self, **together_on(tensors_of(self), device))


@dataclass(frozen=True)
class Pairs:
    """A batch's N pairs: a prompt's chosen completion, and next to it the rejected one."""

    batch: _EitherBatch

    @property
    def is_real(self) -> Tensor:
        """(N,) bool, False = the filler of a short batch."""
        return self.batch.is_real[::2]

    @property
    def indices(self) -> Tensor:
        """(N,) int64, each pair's index in the examples; 0 if it is not real."""
        return self.batch.slots[::2] // 2

    @property
    def lengths(self) -> Tensor:
        """(N, 2) tokens, at least 1: losses divide by them."""
        return self.of(self.batch.completion_mask.sum(-1).clamp(min=1))

    @staticmethod
    def of(values: Tensor) -> Tensor:
        """Values (B,) of the completions as (N, 2), those of the chosen ones first."""
        return values.view(-1, 2)


def tensors_of(batch: Any) -> dict[str, Any]:
    """The tensors among the fields of a dataclass, by name."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass
class PaddedBatch(_EitherBatch):
    """Prompts with their completions in the padded layout, one row per completion.

    The rows of a prompt are neighbours (prompt-major; B = N * K if each has K); the last C columns
    of the ids are the completion.
    """

    input_ids: Tensor  # (B, T) int64, prompt padded on the left, completion on the right; T = P + C
    attention_mask: Tensor  # (B, T) bool, True = a real token
    position_ids: Tensor  # (B, T) int64, see the function of this name

    @property
    def completion_ids(self) -> Tensor:
        """(B, C) int64, the completion's columns of `input_ids`."""
        num_prompt_columns = self.input_ids.shape[1] - self.completion_mask.shape[1]
        return self.input_ids[:, num_prompt_columns:]


def padded_batch(
    prompts: Sequence[Sequence[int]],  # N, none empty: the last token predicts the completion
    completions: Sequence[Sequence[Sequence[int]]],  # for each prompt some
    pad_id: int,  # is masked: any id of the vocabulary will do
    *,
    is_real: Sequence[bool] | None = None,  # for each prompt; None: all True
    width: int = 0,  # of the completions, at least
) -> PaddedBatch:
    """Put N prompts with their completions into one row per completion, on the CPU.

    The rows of a prompt that is not real keep their attention mask (an empty one would give NaN)
    but count nowhere. The slots are 0, 1, ..., the source rows -1, for unknown.
    """
    completion_ids, token_mask, both = _completions(prompts, completions, pad_id, is_real, width)
    prompt_rows = [
        prompt for prompt, group in zip(prompts, completions, strict=True) for _ in group
    ]
    prompt_ids, prompt_mask = left_pad(prompt_rows, pad_id)  # (B, P)
    attention_mask = torch.cat([prompt_mask, token_mask], dim=1)  # (B, T)
    return PaddedBatch(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        **both,
    )


KeysByLayer = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of every layer, by its number."""


@dataclass
class Layout:
    """Which tokens of a `SharedPrefixBatch` see which, for attention.

    If no prompt has several completions, the row holds prompt after prompt, each followed by its
    completion; else all prompts, then all completions. Its *segments* are, in the first case,
    prompts with their completions; in the second prompts, then completions, the *branches*. A token
    sees its segment up to itself, and one of a branch the whole prompt too.

    The *tail* are each prompt's last token and every completion token, in the order of the row: the
    last block computes only these columns, and leaves them at their places in the row.

    Ends are int32 and cumulative: 0, then the end of each range behind the one before.
    """

    segment_ends: Tensor  # (S + 1,), in the row
    tail_ends: Tensor  # (S + 1,), of the segments' columns in the tail
    prompt_ends: Tensor  # (N + 1,), of the prompts that have branches; else (1,)
    group_ends: Tensor  # (N + 1,), of the branches of each prompt, counted from the first; or (1,)
    tail: Tensor  # int64, columns
    num_branch: int  # tokens of the branches, with which the row and the tail end
    longest: int  # tokens of the longest prompt with a completion
    largest: int  # tokens of all branches of a prompt, at most
    keys_by_layer: KeysByLayer | None = None  # if given, layers put theirs in it, (1, H, T, d) each


@dataclass
class SharedPrefixBatch(_EitherBatch):
    """Prompts with their completions in one row without padding, every prompt once.

    A loss uses it like a `PaddedBatch` (masks of B = N * K completions of C tokens). A completion's
    position ids continue its prompt's, wherever it is in the row.
    """

    input_ids: Tensor  # (1, T) int64, T = the sum of all lengths
    position_ids: Tensor  # (1, T) int64
    layout: Layout  # which token sees which
    completion_ids: Tensor  # (B, C) int64, padded on the right
    predictors: Tensor  # (M,) int64, the columns before the M completion tokens: each predicts one
    token_index: Tensor  # (M,) int64, index of each of those tokens in (B, C), flattened
    last: Tensor  # (B,) int64, the column of each completion's last token

    def to(self, device: torch.device | str) -> "SharedPrefixBatch":
        """Copy from the host to a device."""
        own = tensors_of(self)
        moved = together_on(own | tensors_of(self.layout), device)
        layout = {name: moved.pop(name) for name in tensors_of(self.layout)}
        return replace(self, layout=replace(self.layout, **layout), **moved)


AnyBatch = PaddedBatch | SharedPrefixBatch


def shared_prefix_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    pad_id: int,
    *,
    is_real: Sequence[bool] | None = None,
    width: int = 0,
) -> SharedPrefixBatch:
    """Put N prompts with any number of completions each into one row; see `padded_batch`."""
    completion_ids, token_mask, both = _completions(prompts, completions, pad_id, is_real, width)
    owner = np.repeat(np.arange(len(prompts)), [*map(len, completions)])  # (B,)
    # Pieces are the N prompts, then the B completions; `order` is that of the row.
    pieces = [*prompts, *chain.from_iterable(completions)]
    has_branches = len(owner) > len(set(owner))
    order = np.arange(len(pieces))
    if not has_branches:
        order = np.argsort(np.append(order[: len(prompts)], owner), kind="stable")
    lengths = numbers(map(len, pieces))
    prompt_lengths, own_lengths = np.split(lengths, [len(prompts)])  # (N,) and (B,)
    starts = np.empty_like(lengths)  # the first column of each piece
    starts[order] = lengths[order].cumsum() - lengths[order]
    first_position = np.append(0 * prompt_lengths, prompt_lengths[owner])
    positions = np.arange(lengths.sum()) - np.repeat(
        (starts - first_position)[order], lengths[order]
    )

    prompt_last = starts[: len(prompts)] + prompt_lengths - 1  # (N,), columns
    own_starts, has_tokens = starts[len(prompts) :], own_lengths > 0  # (B,)
    before = own_lengths.cumsum() - own_lengths  # (B,), tokens of the completions before each
    token_columns = np.arange(own_lengths.sum()) + np.repeat(own_starts - before, own_lengths)
    predictors = token_columns - 1  # (M,)
    predictors[before[has_tokens]] = prompt_last[owner[has_tokens]]
    last = np.where(has_tokens, own_starts + own_lengths - 1, prompt_last[owner])

    groups = np.zeros_like(prompt_lengths)  # (N,), tokens of all completions of each
    np.add.at(groups, owner, own_lengths)
    branches = own_lengths if has_branches else own_lengths[:0]
    runs = 0 if has_branches else groups
    layout = Layout(
        segment_ends=_ends(prompt_lengths + runs, branches),
        tail_ends=_ends(1 + 0 * prompt_lengths + runs, branches),
        prompt_ends=_ends(prompt_lengths if has_branches else []),
        group_ends=_ends(groups if has_branches else []),
        tail=torch.from_numpy(np.sort(np.append(prompt_last, token_columns))),
        num_branch=int(branches.sum()),
        longest=int(positions.max()) + 1,
        largest=max(2, int(groups.max())),  # FlashAttention takes 1 as one query for each range
    )
    ids = numbers(chain.from_iterable(pieces[piece] for piece in order))
    return SharedPrefixBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        layout=layout,
        completion_ids=completion_ids,
        **both,
        predictors=torch.from_numpy(predictors),
        token_index=torch.from_numpy(np.flatnonzero(token_mask.numpy())),
        last=torch.from_numpy(last),
    )


def _ends(*lengths: Any) -> Tensor:
    """0 and the cumulative lengths, int32."""
    return torch.from_numpy(np.concatenate([[0], *lengths]).cumsum().astype(np.int32))


def _completions(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    pad_id: int,
    is_real: Sequence[bool] | None,
    width: int,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Check the arguments of either layout, and pad the completions on the right.

    Returns ids (B, C), a mask (B, C), True = a token, and the fields that both layouts have alike.
    """
    is_real = [True] * len(prompts) if is_real is None else is_real
    assert len(prompts) == len(completions) == len(is_real), (
        "one list of completions and one flag per prompt"
    )
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt has at least one token"
    rows = [row for group in completions for row in group]
    ids, token_mask = right_pad(rows, pad_id, width)  # (B, C)
    real_rows = [flag for flag, group in zip(is_real, completions, strict=True) for _ in group]
    is_real_row = torch.tensor(real_rows, dtype=torch.bool)  # (B,)
    both = {
        "completion_mask": token_mask & is_real_row[:, None],
        "is_real": is_real_row,
        "slots": torch.arange(len(ids)),
        "source_rows": [-1] * len(ids),
    }
    return ids, token_mask, both


MAKERS: dict[str, Callable[..., AnyBatch]] = {
    "padded": padded_batch,
    "shared_prefix": shared_prefix_batch,
}
"""Functions that make a batch, by layout; `shared_prefix` is the default."""
