"""Padding, position ids, the cut at the first stop token, and the two layouts of a batch.

Masks are bool, True = a real token. They are made here together with the ids and carried along:
nothing later may infer them from `ids != pad`, since GPT-2's pad token is its end-of-text token,
which is also an action that is trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self


def position_ids(mask: Tensor) -> Tensor:
    """Positions that count real tokens only, so that padding changes no log-probability.

    A model with learned positions (GPT-2) that is not given them also counts padding on the left.
    The mask is (B, T) bool, True = a real token; positions are (B, T) int64, never negative: 0 at a
    row's first real token and on the padding before it; padding behind repeats the last position.
    """
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def left_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad rows on the left to the longest one; returns what `right_pad` does."""
    ids, mask = right_pad([row[::-1] for row in rows], pad_id)
    return ids.flip(1), mask.flip(1)


def right_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad B rows of ids, which may be empty, on the right to the longest one.

    Returns:
        ids (B, T) int64; mask (B, T) bool, True = a token of the row. Both on the CPU.
    """
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[index, : len(row)] = True
    return ids, mask


def cut_at_stop(completion_ids: Tensor, stop_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Find where completions (B, C) end: the first stop token counts, what follows it does not.

    Returns:
        completion_mask (B, C) bool, True up to and including the first stop token; has_stop (B,)
        bool, True where the completion has one, False where it was truncated.
    """
    stops = torch.tensor(stop_ids, dtype=torch.long, device=completion_ids.device)
    is_stop = torch.isin(completion_ids, stops).long()  # (B, C)
    return is_stop.cumsum(dim=-1) - is_stop == 0, is_stop.any(dim=-1)


def on_device(tensor: Any, device: torch.device | str) -> Any:
    """Move a tensor, or an object with a method `to`, to a device without a wait of the host."""
    is_here = isinstance(tensor, Tensor) and tensor.device.type == "cpu"
    if is_here and torch.device(device).type not in ("cpu", "meta"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass
class _EitherBatch:
    """Fields and methods of a batch of B completions in either layout."""

    completion_mask: Tensor  # (B, C) bool, True = the token counts in the loss; False if not real
    is_real: Tensor  # (B,) bool, False = a row that only keeps the ranks in step, without weight
    slots: Tensor  # (B,) int64, each completion's index in the caller's tensors; 0 if not real
    rows: list[int]  # B rows of the data set that the prompts came from, or -1

    @property
    def num_tokens(self) -> Tensor:
        """Number of tokens that count in the loss, an int64 scalar that stays on the device."""
        return self.completion_mask.sum()

    def to(self, device: torch.device | str) -> Self:
        """Copy to a device."""
        names = (f.name for f in fields(self) if f.name != "rows")
        return replace(self, **{name: on_device(getattr(self, name), device) for name in names})


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
) -> PaddedBatch:
    """Put N prompts with their completions into one row per completion, on the CPU.

    The rows of a prompt that is not real keep their attention mask (an empty one would give NaN)
    but count nowhere. The slots are 0, 1, ..., the rows of the data set -1, for unknown.
    """
    completion_ids, token_mask, shared = _completions(prompts, completions, pad_id, is_real)
    prompt_rows = [
        prompt for prompt, group in zip(prompts, completions, strict=True) for _ in group
    ]
    prompt_ids, prompt_mask = left_pad(prompt_rows, pad_id)  # (B, P)
    attention_mask = torch.cat([prompt_mask, token_mask], dim=1)  # (B, T)
    return PaddedBatch(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        **shared,
    )


KeysByLayer = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of every layer, by its number."""


@dataclass
class Layout:
    """Columns of the tokens of a `SharedPrefixBatch`, for attention.

    The row holds, prompt after prompt, a *trunk* (the prompt, and its completion if it has only
    one: a causal run) and *branches* (the completions of a prompt with several: each sees the
    prompt and itself).

    The *tail* of a prompt is its last token and its completions: only these columns of the last
    hidden states are read.
    """

    # Per prompt: start, end of the prompt, of the trunk, of the last branch, as half-open ranges
    trunks: list[tuple[int, int, int, int]]
    branch_index: Tensor  # (R, L) int64, the columns of R branches, filled up on the right with 0
    branch_mask: Tensor  # (R, L) bool, True = a token of the branch
    branch_owner: Tensor  # (R,) int64, the prompt of each branch
    tail: Tensor  # (S,) int64, the columns of all tails
    longest: int  # tokens of the longest prompt with a completion
    keys_by_layer: KeysByLayer | None = None  # if given, layers put theirs in it, (1, H, T, d) each
    # Index tensors that attention derives from the columns, for all layers. No container, of which
    # FSDP would give each layer a copy.
    index_cache: Any = field(default_factory=lambda: SimpleNamespace(gathers={}))

    def to(self, device: torch.device | str) -> "Layout":
        """Copy to a device."""
        names = ("branch_index", "branch_mask", "branch_owner", "tail")
        moved = {name: on_device(getattr(self, name), device) for name in names}
        return replace(self, **moved, index_cache=SimpleNamespace(gathers={}))


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


AnyBatch = PaddedBatch | SharedPrefixBatch


def shared_prefix_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    pad_id: int,
    *,
    is_real: Sequence[bool] | None = None,
) -> SharedPrefixBatch:
    """Put N prompts with any number of completions each into one row; see `padded_batch`."""
    completion_ids, token_mask, shared = _completions(prompts, completions, pad_id, is_real)
    ids: list[int] = []
    positions: list[int] = []
    trunks: list[tuple[int, int, int, int]] = []
    branches, owners = [], []
    before: list[int] = []  # the column before each completion token
    last = []
    for prompt, group in zip(prompts, completions, strict=True):
        start, prompt_end = len(ids), len(ids) + len(prompt)
        ids += prompt
        positions += range(len(prompt))
        is_run = len(group) == 1
        trunk_end = prompt_end + (len(group[0]) if is_run else 0)
        for row in group:
            first = len(ids)
            ids += row
            positions += range(len(prompt), len(prompt) + len(row))
            before += [prompt_end - 1, *range(first, first + len(row) - 1)][: len(row)]
            last.append(first + len(row) - 1 if row else prompt_end - 1)
            if not is_run:
                branches.append(range(first, first + len(row)))
                owners.append(len(trunks))
        trunks.append((start, prompt_end, trunk_end, len(ids)))

    branch_index, branch_mask = right_pad(branches, 0)  # (R, L)
    return SharedPrefixBatch(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        layout=Layout(
            trunks,
            branch_index,
            branch_mask,
            torch.tensor(owners, dtype=torch.long),
            torch.tensor([i for _, end, _, last in trunks for i in range(end - 1, last)]),
            max(positions) + 1,
        ),
        completion_ids=completion_ids,
        **shared,
        predictors=torch.tensor(before, dtype=torch.long),
        token_index=token_mask.flatten().nonzero().squeeze(-1),
        last=torch.tensor(last, dtype=torch.long),
    )


def _completions(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    pad_id: int,
    is_real: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Check the arguments of either layout, and pad the completions on the right.

    Returns:
        ids (B, C); mask (B, C), True = a token; the fields that both layouts have alike.
    """
    is_real = [True] * len(prompts) if is_real is None else is_real
    assert len(prompts) == len(completions) == len(is_real), (
        "one list of completions and one flag per prompt"
    )
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt has at least one token"
    ids, token_mask = right_pad([row for group in completions for row in group], pad_id)  # (B, C)
    real_rows = [flag for flag, group in zip(is_real, completions, strict=True) for _ in group]
    is_real_row = torch.tensor(real_rows, dtype=torch.bool)  # (B,)
    shared = {
        "completion_mask": token_mask & is_real_row[:, None],
        "is_real": is_real_row,
        "slots": torch.arange(len(ids)),
        "rows": [-1] * len(ids),
    }
    return ids, token_mask, shared


MAKERS: dict[str, Callable[..., AnyBatch]] = {
    "padded": padded_batch,
    "shared_prefix": shared_prefix_batch,
}
"""Functions that make a batch, by layout."""
