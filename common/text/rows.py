"""A row of a data set as text."""

from dataclasses import dataclass, field
from typing import Any

RawRow = dict[str, Any]
"""A row as its file has it: cells by column, text or messages."""

COMPLETION_COLUMNS: dict[str, tuple[str, ...]] = {
    "sft": ("completion",),
    "preference": ("chosen", "rejected"),
    "prompts": (),
}
"""By the kind of rows: columns next to `prompt`, in the order of the K completions."""


@dataclass
class Row:
    """A prompt with its K completions as text; of a conversation one row per answer."""

    prompt: str  # of a conversation, all that its template writes before the answer
    completions: list[str]  # one for each of its kind's `COMPLETION_COLUMNS`
    columns: dict[str, Any] = field(default_factory=dict)  # the others, for reward functions
    number: int = 0  # index into the rows that were read; answers of one conversation share it
    messages: list[dict[str, Any]] = field(default_factory=list)  # the prompt; empty for text
    is_partial: bool = False  # the template leaves out words, thoughts or calls of an answer

    @property
    def source(self) -> str:
        """Where the row comes from, so that accuracies can be reported separately.

        `trl-lib/tldr-preference` mixes CNN/DailyMail articles into its validation split and has no
        column for it; TRL's `examples/datasets/tldr_preference.py` gives them no SUBREDDIT and no
        POST. Rows of `openai/summarize_from_feedback` have a `batch` column instead.

        Returns:
            The column `source` if the row has one, else `tldr`, `cnn_dm` or `other`.
        """
        source, batch = self.columns.get("source"), self.columns.get("batch")
        if isinstance(source, str):
            return source
        if isinstance(batch, str) and "cnndm" in batch:
            return "cnn_dm"
        if self.prompt.startswith("SUBREDDIT: r/"):
            return "tldr"
        is_article = self.prompt.startswith("TITLE:") and "\n\nPOST:" not in self.prompt
        return "cnn_dm" if is_article else "other"
