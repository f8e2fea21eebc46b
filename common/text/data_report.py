"""What is lost while a split is read: counts, printed lines, and the refusal of too much."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.config.stages import CommonConfig
from common.errors import UserError
from common.text.example import Example
from common.text.tokenise import TokenisedRow, encode

MERGE_SAMPLE = 1000  # rows whose prompt-completion boundary is checked
SHOWN_CHARACTERS = 60  # of each end of a long text in `marked`


class DataReport:
    """Rows kept, dropped and truncated. Lengths are tokens."""

    def __init__(
        self, rows: Sequence[TokenisedRow], split: str, config: CommonConfig, tokenizer: Any
    ) -> None:
        """Count, and tokenise a sample of rows as one text each."""
        kept = [row for row in rows if not row.drop_reason]
        completions = [text for row in kept for text in row.completions]
        self.split, self.num_rows, self.num_kept = split, len(rows), len(kept)
        self.dropped = Counter(row.drop_reason for row in rows if row.drop_reason)
        # Counted from 1; 0 if none is
        self.first_dropped = next((row.example.row + 1 for row in rows if row.drop_reason), 0)
        self.num_prompts_truncated = sum(row.prompt.is_truncated for row in kept)
        self.num_completions = len(completions)
        # They end without a stop token
        self.num_completions_truncated = sum(text.is_truncated for text in completions)
        measured = [row for row in rows if not row.drop_reason.startswith("empty")]
        lengths = {
            "prompt": [row.prompt.num_tokens for row in measured],
            "completion": [text.num_tokens for row in measured for text in row.completions],
        }
        self.limits = {  # that keep 95 % whole
            noun: int(np.quantile(numbers, 0.95, method="inverted_cdf"))
            for noun, numbers in lengths.items()
            if numbers
        }
        every = -(-len(kept) // MERGE_SAMPLE) or 1
        sample = [(row.prompt.text, text.text) for row in kept[::every] for text in row.completions]
        self.num_boundaries_checked = len(sample)
        self.num_boundary_merges = count_boundary_merges(sample, tokenizer)

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
        limits = " and ".join(f"--max_{noun}_length {n}" for noun, n in self.limits.items())
        lines = [
            f"{self.split}: {self.num_kept} of {self.num_rows} rows{dropped}, "
            f"truncated {self.num_prompts_truncated} prompts and "
            f"{self.num_completions_truncated} completions",
            f"  {limits} would keep 95 % whole; {self.num_boundary_merges} of "
            f"{self.num_boundaries_checked} would merge across the boundary",
        ]
        if 2 * self.num_completions_truncated > self.num_completions:
            lines.append(
                f"  warning: {self.num_completions_truncated} of {self.num_completions} "
                "completions lose their stop token: only the others teach to stop"
            )
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


def count_boundary_merges(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> int:
    """Number of (prompt, completion) pairs with other tokens when tokenised as one text.

    Such rows teach the model a split that it would not meet in running text; most often a missing
    space at the start of the completion is the cause.
    """
    prompts = encode([prompt for prompt, _ in pairs], tokenizer)
    completions = encode([completion for _, completion in pairs], tokenizer)
    joint = encode([prompt + completion for prompt, completion in pairs], tokenizer)
    return sum(p + c != j for p, c, j in zip(prompts, completions, joint, strict=True))


def marked(example: Example, tokenizer: Any) -> str:
    """A row decoded from its ids, the trained completion in [[]]; long texts are shortened."""
    shown = []
    for text in map(tokenizer.decode, (example.prompt_ids, *example.completions)):
        is_long = len(text) > 2 * SHOWN_CHARACTERS
        short = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}" if is_long else text
        shown.append(repr(short)[1:-1])
    prompt, completion = shown
    return f"{prompt}[[{completion}]]"
