"""What reward functions say beside rewards: TRL's `log_metric` and `log_extra`.

Metrics reach `metrics.jsonl` and wandb as `logged/<name>`, columns the table of samples; where a
run has neither (pairs from rollouts, evaluation) both are dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.text.rows import TRAINER_ARGUMENTS

LARGEST = torch.finfo(torch.float32).max  # of what a function may return or log


@dataclass
class Notes:
    """What the functions of a run note about B completions.

    Attributes:
        num_rows: B.
        trainer_state: What functions get under that name: transformers' `TrainerState`.
        metrics: The values that were logged under each name, one for each call of `log_metric`.
        columns: Under each name B values, None for completions that nothing was noted of.
    """

    num_rows: int
    trainer_state: Any = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """What a function that is called on some of the rows gets, as TRL (1.16) names it.

        Both functions raise a ValueError for what cannot be logged.
        """

        def log_extra(column: str, values: Sequence[Any]) -> None:
            check_name("log_extra", column)
            if len(values) != len(rows):
                raise ValueError(
                    f"log_extra({column!r}) got {len(values)} values for {len(rows)} completions"
                )
            noted = self.columns.setdefault(column, [None] * self.num_rows)
            for row, value in zip(rows, values, strict=True):
                noted[row] = printable(value)

        def log_metric(name: str, value: float) -> None:
            check_name("log_metric", name)
            number = as_number(value)
            if number is None:
                raise ValueError(f"log_metric({name!r}) got {value!r}; it must be a finite number")
            self.metrics.setdefault(name, []).append(number)

        given = (self.trainer_state, log_extra, log_metric)
        return dict(zip(TRAINER_ARGUMENTS, given, strict=True))


def check_name(function: str, name: Any) -> None:
    """Raise a ValueError for a name that is no name: it stands in files and tables."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"{function} got the name {name!r}; it must be a text of one line")


def as_number(value: Any) -> float | None:
    """A finite number, also one of numpy or in a tensor, as float; None for anything else."""
    value = scalar(value)
    is_number = isinstance(value, Real)
    if not is_number or not abs(value) <= LARGEST:  # False for NaN; 10^400 does not fit a float
        return None
    return float(value)


def printable(value: Any) -> Any:
    """Text, a number or None as it is; of anything else its text."""
    value = scalar(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def scalar(value: Any) -> Any:
    """The Python number in a scalar of numpy or torch; anything else as it is."""
    is_scalar = isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0
    return value.item() if is_scalar else value
