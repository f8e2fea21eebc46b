"""Progress and losses while a split is read: a bar, and a report."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from common import distributed
from common.errors import UserError

Item = TypeVar("Item")


def progress(rows: Iterable[Item], title: str, total: int | None = None) -> Iterator[Item]:
    """The rows, counted by a bar once they take seconds; off a terminal every 30 of them."""
    from tqdm import tqdm

    seconds = 0.2 if sys.stderr.isatty() else 30.0
    return iter(
        tqdm(
            rows,
            title,
            total,
            leave=False,
            mininterval=seconds,
            delay=10 * seconds if seconds < 1 else seconds,
            unit=" rows",
            unit_scale=True,
            disable=not distributed.is_rank0(),
        )
    )


@dataclass
class DataReport:
    """Rows kept, dropped and truncated. Lengths are tokens: median, 90 %, 99 %, maximum."""

    split: str
    num_rows: int
    num_kept: int = 0
    dropped: dict[str, int] = field(default_factory=Counter)  # by the reason
    first_dropped: int = 0  # its row, counted from 1
    num_prompts_truncated: int = 0
    num_completions_truncated: int = 0
    num_boundary_merges: int = 0
    num_boundaries_checked: int = 0
    prompt_lengths: Sequence[int] = ()
    completion_lengths: Sequence[int] = ()
    num_conversations: int = 0  # if rows are their answers

    @property
    def num_dropped(self) -> int:
        """Rows that did not become examples."""
        return sum(self.dropped.values())

    @property
    def drop_counts(self) -> str:
        """The reasons for dropping rows, as `2 empty completion, 1 identical pair`."""
        return ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items()))

    def __str__(self) -> str:
        """Lines to print."""
        dropped = f" ({self.drop_counts})" if self.num_dropped else ""
        lines = [
            f"{self.split}: {self.num_kept} of {self.num_rows} rows{dropped}, "
            f"truncated {self.num_prompts_truncated} prompts and "
            f"{self.num_completions_truncated} completions",
        ]
        lengths = (self.prompt_lengths, self.completion_lengths)
        prompt, completion = ("/".join(map(str, quantiles)) for quantiles in lengths)
        lines.append(f"  tokens at 50/90/99/100 %: prompt {prompt}")
        if self.num_boundaries_checked:
            lines[-1] += (
                f", completion {completion}; {self.num_boundary_merges} of "
                f"{self.num_boundaries_checked} would merge across the boundary"
            )
        if self.num_conversations:
            lines.append(f"  rows are the answers of {self.num_conversations} conversations")
        return "\n".join(lines)

    def refuse_lossy(self, max_dropped_fraction: float) -> None:
        """Raise a UserError if too few rows are left."""
        if not self.num_rows:
            raise UserError(
                f"split {self.split!r} has nothing to train: every answer has weight 0 or train "
                "false."
            )
        fraction = self.num_dropped / self.num_rows
        if fraction > max_dropped_fraction or not self.num_kept:
            raise UserError(
                f"split {self.split!r} would lose {self.num_dropped} of {self.num_rows} rows "
                f"({self.drop_counts}; the first is row {self.first_dropped}) and "
                f"max_dropped_fraction is {max_dropped_fraction}; "
                "clean the data or change the length limits or max_dropped_fraction."
            )
