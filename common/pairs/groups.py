"""Comparisons of completions: grouped by prompt, weighted, and in micro-batches.

A completion is scored once, however often it is compared: InstructGPT (Ouyang et al. 2022, section
3.5) trains on all comparisons of a prompt's K completions at once, with K forward passes in the
place of K (K - 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common import data
from common.config import CommonConfig
from common.data import Example, Piece
from common.errors import LARGEST, UserError
from common.losses import wins
from common.padding import AnyBatch, on_device


def group(examples: Sequence[Example], *, by_prompt: bool) -> list[list[int]]:
    """Rows that stay in one batch, by their first ones: all pairs of a prompt, or each alone."""
    groups: dict[Any, list[int]] = {}
    for row in range(len(examples)):
        key = tuple(examples[row].prompt_ids) if by_prompt else row
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def weights(groups: Sequence[Sequence[int]]) -> Tensor:
    """What each pair counts, so that every group counts 1 (InstructGPT eq. 1): (rows,) float32."""
    result = torch.zeros(sum(map(len, groups)))
    for rows in groups:
        result[rows] = 1 / len(rows)
    return result


def margins(examples: Sequence[Example], column: str) -> Tensor:
    """A column of all rows, (rows,) float32; zeros without a name.

    Raises:
        UserError: it is not a finite number in some row.
    """
    if not column:
        return torch.zeros(len(examples))
    values = []
    for example in examples:
        value: Any = example.columns.get(column)
        if type(value) not in (int, float) or not abs(value) <= LARGEST:  # NaN compares as False
            raise UserError(
                f"row {example.row + 1} of the pairs has {value!r} in its column {column!r}; "
                "--margin_column names one with a finite number in every row."
            )
        values.append(value)
    return torch.tensor(values, dtype=torch.float32)


def length_balance(examples: Sequence[Example]) -> float:
    """Share of the pairs whose chosen completion is longer: the accuracy of preferring length."""
    return float(wins(*data.lengths(examples)[:, 1:].unbind(-1)).double().mean())


# ---- micro-batches -------------------------------------------------------------------------------


@dataclass
class PairBatch:
    """Completions that go through one forward pass, and which of them are compared.

    Attributes:
        batch: B completions, each once for its prompt.
        pairs: (N, 2) int64, the chosen and the rejected one of every comparison, among the B. N is
            0 in a filler that keeps the ranks in step.
        rows: (N,) int64, the comparisons' rows.
    """

    batch: AnyBatch
    pairs: Tensor
    rows: Tensor

    def to(self, device: torch.device | str) -> "PairBatch":
        """Copy to a device."""
        return PairBatch(*(on_device(x, device) for x in (self.batch, self.pairs, self.rows)))


@dataclass
class ComparedPiece(Piece):
    """Completions of a prompt, each once; the weight counts pairs.

    Completion k of row n has the place n * 2 + k, n the first row that it is in.
    """

    pairs: list[tuple[int, int, int]] = field(default_factory=list)  # row, chosen, rejected


def micro_batches(
    examples: Sequence[Example],
    groups: Sequence[Sequence[int]],
    config: CommonConfig,
    pad_id: int,
) -> list[PairBatch]:
    """This rank's comparisons of a step, packed by length; as many on every rank. Collective.

    The rows of a group share a prompt, which with their completions is computed once as far as the
    limits allow.
    """
    pieces = [piece for rows in groups for piece in cut(examples, rows, config)]
    packs = data.pack(pieces, config, num_completions=2)
    return [collate(part, config.layout, pad_id) for part in packs]


def cut(
    examples: Sequence[Example], rows: Sequence[int], config: CommonConfig
) -> list[ComparedPiece]:
    """The comparisons of a prompt, in their order, in pieces that the limits allow."""
    pieces: list[ComparedPiece] = []
    for row in rows:
        example = examples[row]
        longer = with_pair(pieces[-1], example, row) if pieces else None
        if longer and data.fits([longer], config):
            pieces[-1] = longer
        else:
            alone = ComparedPiece(example.prompt_ids, [], [], weight=0, row=example.row)
            pieces.append(with_pair(alone, example, row))
    return pieces


def with_pair(piece: ComparedPiece, example: Example, row: int) -> ComparedPiece:
    """The piece with one more comparison, and with those of its completions that are new."""
    assert piece.prompt_ids == example.prompt_ids
    completions, places = list(piece.completions), list(piece.places)
    for k, ids in enumerate(example.completions):
        if ids not in completions:
            completions.append(ids)
            places.append(2 * row + k)
    chosen, rejected = (completions.index(ids) for ids in example.completions)
    pairs = [*piece.pairs, (row, chosen, rejected)]
    return ComparedPiece(piece.prompt_ids, completions, places, len(pairs), piece.row, pairs)


def collate(pieces: Sequence[Piece], layout: str, pad_id: int) -> PairBatch:
    """The pieces as one batch; a filler among them has no comparison."""
    found, first = [], 0
    for piece in pieces:
        for row, chosen, rejected in piece.pairs if isinstance(piece, ComparedPiece) else []:
            found.append((row, first + chosen, first + rejected))
        first += len(piece.completions)
    table = torch.tensor(found, dtype=torch.int64).view(-1, 3)  # (N, 3)
    return PairBatch(data.collate(pieces, layout, pad_id), table[:, 1:], table[:, 0])
