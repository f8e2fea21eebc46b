"""Report blocks as Markdown."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

from common.record.terminal import EMPTY, is_blank, markdown_table, printable
from common.report.blocks import Block, Picture, Sample, SampleBrowser, Section, Table

WIDEST_CELL = 40  # characters; a table with longer texts is not padded, no terminal is that wide


def page(title: str, facts: Mapping[str, str], blocks: Sequence[Block], folder: Path) -> str:
    """The whole document; paths are relative to the folder in which it will be."""
    line = ", ".join(f"{name} {value}" for name, value in facts.items())
    texts = [f"# {without_html(title)}", without_html(line), *paragraphs(blocks, folder)]
    return printable("\n\n".join(filter(None, texts)) + "\n", controls="\n\t")


def paragraphs(blocks: Sequence[Block], folder: Path, level: int = 2) -> list[str]:
    """The blocks; headings of sections are of this level."""
    texts: list[str] = []
    for block in blocks:
        match block:
            case Section(title, inner):
                texts.append(f"{'#' * level} {one_line(title)}")
                texts += paragraphs(inner, folder, level + 1)
            case str():
                texts.append(without_html(block))
            case Table(headers, rows, caption):
                texts += [table(headers, rows), emphasised(caption)]
            case Picture(path, caption):
                link = Path(os.path.relpath(path, folder)).as_posix().replace(" ", "%20")
                label = one_line(caption).replace("[", "\\[").replace("]", "\\]")
                texts.append(f"![{label}]({link})")
            case SampleBrowser(samples, caption):
                texts.append(emphasised(caption))
                for number, sample in enumerate(samples, 1):
                    texts += [f"{'#' * level} Prompt {number}", *completions(sample)]
    return list(filter(None, texts))


def without_html(text: str) -> str:
    """The text with HTML and pictures shown rather than obeyed, but inside `code`, where they are.

    Markdown lets HTML through, and a text may quote what a model wrote.
    """
    pieces = re.split(r"(`[^`\n]*`)", text)
    return "".join(piece if piece.startswith("`") else escaped(piece) for piece in pieces)


def escaped(text: str) -> str:
    """Text that is no HTML, and no picture."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("![", "!\\[")


def one_line(text: str) -> str:
    """Text of data in a line: no link of a model's making either."""
    return " ".join(escaped(text).replace("](", "]\\(").split())


def emphasised(caption: str) -> str:
    """A caption as a paragraph."""
    return caption and f"*{one_line(caption)}*"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, aligned where its cells are short."""
    lines = [[one_line(cell) for cell in row] for row in [headers, *rows]]
    if all(len(cell) <= WIDEST_CELL for line in lines for cell in line):
        return markdown_table(lines[0], lines[1:])
    lines.insert(1, ["---"] * len(headers))
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def completions(sample: Sample) -> list[str]:
    """A prompt in a block of code that it cannot end, and a table of its completions."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", sample.prompt)), default=0))
    rows = [
        (moment, each.label, f"*{EMPTY}*" if is_blank(each.text) else each.text, each.note)
        for moment, answers in sample.frames.items()
        for each in answers
    ]
    has_moments, has_notes = (any(row[i] for row in rows) for i in (0, 3))
    shown = (has_moments, True, True, has_notes)
    lines = [list(compress(row, shown)) for row in [("when", "system", "completion", ""), *rows]]
    return [f"{fence}text\n{sample.prompt}\n{fence}", table(lines[0], lines[1:])]
