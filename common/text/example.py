"""A row as token ids, and the vocabulary of those ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a run, and the ids that pad a batch and end a completion.

    `model.load.load_vocabulary` makes it.
    """

    tokenizer: Any
    pad_id: int  # fills padding, which is masked
    stop_ids: Sequence[int]  # each ends a completion; the first is appended for training


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
        source: `Row.source` of the row, before truncation.
        messages: The prompt as messages, empty if the row was text.
    """

    row: int
    prompt: str
    prompt_ids: list[int]
    completions: list[list[int]]
    columns: dict[str, Any]
    source: str = "other"
    messages: list[dict[str, Any]] = field(default_factory=list)
