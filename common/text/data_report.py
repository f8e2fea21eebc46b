"""What is lost while a split is read: counts, printed lines, and the refusal of too much."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from common.errors import UserError
from common.text.example import Example
from common.text.tokenise import TOO_LONG, TokenisedRow

SHOWN_CHARACTERS = 60  # of each end of a long text in `marked`


def describe(rows: Sequence[TokenisedRow], split: str) -> str:
    """Lines to print about rows that are kept, dropped and truncated; lengths are tokens."""
    kept = [row for row in rows if not row.drop_reason]
    completions = [text for row in kept for text in row.completions]
    num_prompts_cut = sum(row.prompt.is_truncated for row in kept)
    num_completions_cut = sum(text.is_truncated for text in completions)  # they lose the stop token
    measured = [row for row in rows if not row.drop_reason.startswith("empty")]
    lengths = {
        "prompt": sorted(row.prompt.num_tokens for row in measured),
        "completion": sorted(text.num_tokens for row in measured for text in row.completions),
    }
    # A prompt may be dropped for its length: those that other reasons drop are of the same 5%
    num_others = sum(row.drop_reason not in ("", TOO_LONG) for row in rows)
    most_over = {
        "prompt": max(0, len(rows) // 20 - num_others),
        "completion": len(lengths["completion"]) // 20,
    }
    limits = [
        f"--max_{noun}_length {numbers[max(0, len(numbers) - 1 - most_over[noun])]}"
        for noun, numbers in lengths.items()
        if numbers
    ]
    dropped = drop_counts(rows)
    lines = [
        f"{split}: {len(kept)} of {len(rows)} rows{f' ({dropped})' if dropped else ''}, truncated "
        f"{num_prompts_cut} prompts and {num_completions_cut} completions",
        f"  {' and '.join(limits)} would keep 95 % whole",
    ]
    if 2 * num_completions_cut > len(completions):
        few = "only the others teach" if num_completions_cut < len(completions) else "none teaches"
        lines.append(
            f"  warning: {num_completions_cut} of {len(completions)} completions lose their stop "
            f"token: {few} to stop; a longer --max_completion_length keeps it"
        )
    return "\n".join(lines)


def drop_counts(rows: Sequence[TokenisedRow]) -> str:
    """As `2 empty completion, 1 identical pair; the first is row 3`, counted from 1."""
    dropped = [row for row in rows if row.drop_reason]
    counts = Counter(row.drop_reason for row in dropped)
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items()))
    return f"{reasons}; the first is row {dropped[0].example.row + 1}" if dropped else ""


def refuse_lossy(rows: Sequence[TokenisedRow], split: str, max_dropped_fraction: float) -> None:
    """Raise a UserError if too few rows are left.

    A single row, as an identical pair, is no fault of the data set or the flags: it is dropped
    where there are more than two, unless the flag allows none.
    """
    if not rows:
        raise UserError(
            f"split {split!r} has nothing to train: every answer has weight 0 or train false."
        )
    num_dropped = sum(bool(row.drop_reason) for row in rows)
    is_single = num_dropped == 1 and len(rows) > 2 and max_dropped_fraction > 0
    is_lossy = num_dropped > max_dropped_fraction * len(rows) and not is_single
    if is_lossy or num_dropped == len(rows):
        raise UserError(
            f"split {split!r} would lose {num_dropped} of {len(rows)} rows ({drop_counts(rows)}) "
            f"and --max_dropped_fraction is {max_dropped_fraction}; clean the data or change "
            "--max_prompt_length, --max_completion_length or --max_dropped_fraction."
        )


def marked(example: Example, tokenizer: Any) -> str:
    """A row decoded from its ids, the trained completion in [[]]; long texts are shortened."""
    shown = []
    for text in map(tokenizer.decode, (example.prompt_ids, *example.completions)):
        is_long = len(text) > 2 * SHOWN_CHARACTERS
        short = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}" if is_long else text
        shown.append(repr(short)[1:-1])
    prompt, completion = shown
    return f"{prompt}[[{completion}]]"
