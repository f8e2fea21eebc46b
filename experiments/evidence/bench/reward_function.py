"""The reward of the benchmark's GRPO rows: costs nothing, and is the same file for both sides."""

from collections.abc import Sequence
from typing import Any


def even_share(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """The share of even token ids in each completion."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]
