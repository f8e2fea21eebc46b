"""A report of what is lost while a split is read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.errors import UserError

PERCENT = (50, 90, 95, 99, 100)  # of a file's prompts and completions, at which lengths are printed


@dataclass
class DataReport:
    """Rows kept, dropped and truncated. Lengths are tokens."""

    split: str
    num_rows: int
    limits: Mapping[str, int]  # of a prompt and of a completion
    num_kept: int = 0
    dropped: dict[str, int] = field(default_factory=Counter)  # by the reason
    first_dropped: int = 0  # its row, counted from 1
    num_prompts_truncated: int = 0
    num_completions: int = 0  # of the rows kept
    num_completions_truncated: int = 0  # they end without a stop token
    num_boundary_merges: int = 0
    num_boundaries_checked: int = 0
    # Before the cut, also of dropped rows that are not empty
    lengths: dict[str, list[int]] = field(default_factory=lambda: {"prompt": [], "completion": []})
    num_conversations: int = 0  # if rows are their answers

    @property
    def num_dropped(self) -> int:
        """Rows that did not become examples."""
        return sum(self.dropped.values())

    @property
    def drop_counts(self) -> str:
        """The reasons for dropping rows, as `2 empty completion, 1 identical pair`."""
        return ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items()))

    def quantiles(self, noun: str) -> list[int]:
        """The smallest length that each share of PERCENT does not exceed."""
        ordered = sorted(self.lengths[noun]) or [0]
        return [ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENT]

    def __str__(self) -> str:
        """Lines to print."""
        dropped = f" ({self.drop_counts})" if self.num_dropped else ""
        lines = [
            f"{self.split}: {self.num_kept} of {self.num_rows} rows{dropped}, "
            f"truncated {self.num_prompts_truncated} prompts and "
            f"{self.num_completions_truncated} completions",
        ]
        numbers = (PERCENT, self.quantiles("prompt"), self.quantiles("completion"))
        percent, prompt, completion = ("/".join(map(str, row)) for row in numbers)
        lines.append(f"  tokens before the cut at {percent} %: prompt {prompt}")
        if self.num_boundaries_checked:
            lines[-1] += (
                f", completion {completion}; {self.num_boundary_merges} of "
                f"{self.num_boundaries_checked} would merge across the boundary"
            )
        for noun, limit in self.limits.items():
            if (needed := self.quantiles(noun)[PERCENT.index(95)]) > limit:
                lines.append(f"  --max_{noun}_length {needed} would keep 95 % whole, it is {limit}")
        if 2 * self.num_completions_truncated > self.num_completions:
            lines.append(
                f"  warning: {self.num_completions_truncated} of {self.num_completions} "
                "completions lose their stop token: only the others teach to stop"
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
