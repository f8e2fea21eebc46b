"""Margins and lengths of pairs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common import data
from common.data import Example
from common.errors import UserError
from common.losses import wins


def margins(examples: Sequence[Example], column: str) -> Tensor:
    """A column of all rows, (rows,) float32; zeros without a name.

    Raises:
        UserError: some row has no finite number in it.
    """
    if not column:
        return torch.zeros(len(examples))
    values = []
    for example in examples:
        value: Any = example.columns.get(column)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(
                f"row {example.row + 1} of the pairs has {value!r} in its column {column!r}; "
                "--margin_column names one with a finite number in every row."
            )
        values.append(value)
    return torch.tensor(values, dtype=torch.float32)


def length_balance(examples: Sequence[Example]) -> float:
    """Share of the pairs whose chosen completion is longer: the accuracy of preferring length."""
    return float(wins(*data.lengths(examples)[:, 1:].unbind(-1)).double().mean())
