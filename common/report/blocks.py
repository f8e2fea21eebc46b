"""What a report is made of, without how it looks: see `common/report/page.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.record.terminal import markdown_table


@dataclass(frozen=True)
class Table:
    """Cells as text, as many as there are headers; an interval "[low, high]" at an end is muted."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __str__(self) -> str:
        """The table as Markdown."""
        return markdown_table(self.headers, self.rows)


@dataclass(frozen=True)
class Picture:
    """A PNG, of which the HTML page holds a copy; its caption is also what is read out for it."""

    path: Path
    caption: str = ""


@dataclass(frozen=True)
class Completion:
    """One text of a sample."""

    label: str  # who wrote it, or "chosen", "rejected"
    text: str
    note: str = ""  # what it got, such as "reward 0.53"


@dataclass(frozen=True)
class Sample:
    """A prompt with its completions by moment of training: "step 40", or "" for the only one."""

    prompt: str
    frames: Mapping[str, Sequence[Completion]]


@dataclass(frozen=True)
class SampleBrowser:
    """Samples one at a time, to be leafed through; all below each other without JavaScript."""

    samples: Sequence[Sample]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; sections may be nested."""

    title: str
    blocks: "Sequence[Block]"


# A text has paragraphs and lists (`- `, `1. `) with **bold**, *emphasis*, `code` and
# [links](https://...); HTML in it is shown, not obeyed.
Block = str | Table | Picture | SampleBrowser | Section
