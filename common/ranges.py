"""How large and how small a number in a config may be: one rule for each kind of field.

They refuse what no computer can do, as a step of 10^30 rows, and what float32 turns into 0 or an
infinity. What a single field excludes beyond that is refused where the field is defined.
"""

import dataclasses
import math
from typing import Any

from common.errors import UserError, shown

LARGEST_COUNT = 2**31 - 1  # of tokens, rows, steps, seconds
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of the normal numbers of float32
SMALLEST_TEMPERATURE = 1e-6  # logits are divided by it
COUNTED_IN_FRACTIONS = ("num_train_epochs",)
NO_COUNTS = ("seed",)


def refuse_beyond_range(config: Any) -> None:
    """Raise a UserError for a number, alone or in a list, that no field of its kind may hold.

    Whole numbers are counts. Other numbers take part in float32 arithmetic: 0 is allowed here, and
    NaN and infinities are left to those who know what the field needs.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if isinstance(number, float) and (number == 0 or not math.isfinite(number)):
                continue
            refuse_beyond(f.name, number)


def refuse_beyond(name: str, number: float) -> None:
    """Raise a UserError for a number that the field may not hold."""
    is_count = isinstance(number, int) or name in COUNTED_IN_FRACTIONS
    if is_count and name not in NO_COUNTS and number > LARGEST_COUNT:
        raise UserError(f"--{name} is {shown(number)}; it must be at most {LARGEST_COUNT:,}.")
    if isinstance(number, int):
        return
    if name.endswith("temperature") and 0 < number < SMALLEST_TEMPERATURE:
        raise UserError(f"--{name} is {number}; it must be at least {SMALLEST_TEMPERATURE:g}.")
    if not SMALLEST <= abs(number) <= LARGEST:
        raise UserError(
            f"--{name} is {number}; in size it must lie between {SMALLEST:.3g} and {LARGEST:.3g}, "
            "the numbers of float32."
        )
