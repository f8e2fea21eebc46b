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

    K is 1 in SFT, 2 of a pair (chosen, rejected) and 0 of a prompt alone. A completion ends in a
    stop token unless it was truncated.
    """

    row: int  # index into the rows that were read; answers of one conversation share it
    prompt: str  # its text, after truncation
    prompt_ids: list[int]  # never empty
    completions: list[list[int]]
    columns: dict[str, Any]  # the others, for reward functions and reports
    source: str = "other"  # as `tokenise.source_of`
    messages: list[dict[str, Any]] = field(default_factory=list)  # the prompt; empty for text
    # Of the K completions, cut as they are, without stop token; only where `load_examples` keeps
    # them. Those of the ids may differ: tokenizers change letters and white space.
    texts: list[str] = field(default_factory=list)
