"""What a report is made of, without how it looks: see `common/report/page.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """Paragraphs in a small part of Markdown.

    Attributes:
        text: Paragraphs and lists (`- `, `1. `) between empty lines, with **bold**, *emphasis*,
            `code` and [links](https://...). HTML in it is shown, not obeyed.
    """

    text: str


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        headers: Column names.
        rows: As many cells as there are headers, shown as they are; an interval "[low, high]" at
            an end is muted.
        caption: One sentence below.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG.

    Attributes:
        path: Of the file; the HTML page holds a copy, the Markdown names it.
        caption: One sentence below; also what is read out in the picture's place.
    """

    path: Path
    caption: str = ""


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: What it shows.
        x: Places, not falling; usually optimiser steps.
        y: As many values; NaN is a gap.
        exact: Never smoothed, however many points there are.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    exact: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes.

    Attributes:
        title: Of the panel.
        unit: Of the y axis.
        lines: The curves.
        x_label: Of the x axis.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x_label: str = "optimiser step"


@dataclass(frozen=True)
class Curves:
    """Panels next to each other, with values where the pointer is.

    Attributes:
        panels: In reading order.
        caption: One sentence below.
        picture: A PNG of the same, which the Markdown names in their place.
    """

    panels: Sequence[Panel]
    caption: str = ""
    picture: Path | None = None


@dataclass(frozen=True)
class Token:
    """A token with what was measured of it.

    Attributes:
        text: As decoded alone.
        values: By name, in the order in which they are offered; 0 has no colour.
    """

    text: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class TokenColours:
    """Text whose tokens are coloured by one of their values: blue above 0, orange below.

    Attributes:
        tokens: In order.
        caption: One sentence below.
    """

    tokens: Sequence[Token]
    caption: str = ""


@dataclass(frozen=True)
class Completion:
    """One text of a sample.

    Attributes:
        label: Who wrote it, or "chosen", "rejected".
        text: As it is.
        note: What it got, such as "reward 0.53".
        tokens: The same text in tokens, to be coloured; may be empty.
    """

    label: str
    text: str
    note: str = ""
    tokens: Sequence[Token] = ()


@dataclass(frozen=True)
class Frame:
    """The completions of a sample at one moment of training.

    Attributes:
        title: Of the moment, such as "step 40"; "" where there is only one.
        completions: In order.
    """

    title: str
    completions: Sequence[Completion]


@dataclass(frozen=True)
class Sample:
    """A prompt with its completions, over training if there are several frames."""

    prompt: str
    frames: Sequence[Frame]


@dataclass(frozen=True)
class SampleBrowser:
    """Samples one at a time, to be leafed through; all below each other without JavaScript.

    Attributes:
        samples: In order.
        caption: One sentence below.
    """

    samples: Sequence[Sample]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; sections may be nested."""

    title: str
    blocks: "Sequence[Block]" = field(default_factory=tuple)


Block = Text | Table | Picture | Curves | TokenColours | SampleBrowser | Section
