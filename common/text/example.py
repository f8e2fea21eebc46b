"""A row as token ids."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Example:
    """A prompt with its K completions as token ids.

    Attributes:
        row: Index into the rows that were read; answers of one conversation share it.
        prompt: The prompt's text, after truncation.
        prompt_ids: Ids of `prompt`, never empty.
        completions: K lists of ids (sft 1, preference 2: chosen, rejected; prompts 0), each ending
            in the stop token unless it was truncated.
        columns: The row's other columns, for reward functions and reports.
        source: Where the row comes from, as `row_source` tells before truncation.
        messages: The prompt as messages, empty if the row holds text.
    """

    row: int
    prompt: str
    prompt_ids: list[int]
    completions: list[list[int]]
    columns: dict[str, Any]
    source: str = "other"
    messages: list[dict[str, Any]] = field(default_factory=list)
