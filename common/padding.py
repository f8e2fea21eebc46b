"""Position ids, padding and stop tokens.

Masks are bool, True = a real token. They are made here together with the ids and carried along:
nothing later may infer them from `ids != pad`, since GPT-2's pad token is its end-of-text token,
which is also an action that is trained.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor


def position_ids(mask: Tensor) -> Tensor:
    """Positions that count real tokens only, so that padding changes no log-probability.

    A model with learned positions (GPT-2) that is not given them also counts padding on the left.
    The mask is (B, T) bool, True = a real token; positions are (B, T) int64, never negative: 0 at a
    row's first real token and on the padding before it; padding behind repeats the last position.

    >>> position_ids(torch.tensor([[False, False, True, True, True]]))
    tensor([[0, 0, 0, 1, 2]])
    """
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def left_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad rows on the left to the longest one; returns what `right_pad` does.

    >>> ids, mask = left_pad([[5, 6, 7], [8]], pad_id=0)
    >>> ids.tolist()
    [[5, 6, 7], [0, 0, 8]]
    """
    ids, mask = right_pad([row[::-1] for row in rows], pad_id)
    return ids.flip(1), mask.flip(1)


def right_pad(rows: Sequence[Sequence[int]], pad_id: int, width: int = 0) -> tuple[Tensor, Tensor]:
    """Pad B rows of ids, which may be empty, on the right to the longest one, at least to `width`.

    Ids are (B, T) int64, the mask is (B, T) bool, True = a token of the row. Both on the CPU.
    """
    lengths = numbers(map(len, rows))  # (B,)
    mask = np.arange(lengths.max(initial=width)) < lengths[:, None]  # (B, T)
    ids = np.full(mask.shape, pad_id)
    ids[mask] = numbers(chain.from_iterable(rows))
    return torch.from_numpy(ids), torch.from_numpy(mask)


def numbers(values: Iterable[int]) -> Any:
    """An int64 array of integers."""
    return np.fromiter(values, np.int64)


def cut_at_stop(completion_ids: Tensor, stop_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Find where completions (B, C) end: the first stop token counts, what follows it does not.

    The mask (B, C), bool, is True up to and including the first stop token; has_stop (B,), bool,
    where the completion has one and was not truncated.

    >>> mask, has_stop = cut_at_stop(torch.tensor([[7, 2, 9], [7, 8, 9]]), stop_ids=[2])
    >>> mask.int().tolist(), has_stop.tolist()
    ([[1, 1, 0], [1, 1, 1]], [True, False])
    """
    stops = torch.tensor(stop_ids, dtype=torch.long, device=completion_ids.device)
    is_stop = torch.isin(completion_ids, stops).long()  # (B, C)
    return is_stop.cumsum(dim=-1) - is_stop == 0, is_stop.any(dim=-1)
