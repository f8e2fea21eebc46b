"""Report blocks as Markdown."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from common.record.terminal import NOT_MEASURED, format_number, markdown_table
from common.report.blocks import (
    Block,
    Completion,
    Curves,
    Panel,
    Picture,
    Sample,
    Section,
    Table,
    Text,
    TokenColours,
)

WIDEST_CELL = 40  # characters; a table with longer texts is not padded, no terminal is that wide
MOST_COLOURED = 8  # tokens with the largest values that stand for a coloured text


def markdown(blocks: Sequence[Block], folder: Path, level: int = 2) -> list[str]:
    """Paragraphs of Markdown.

    Args:
        blocks: What to show.
        folder: Where the file will be; paths are relative to it.
        level: Of the headings of sections.
    """
    return [part for block in blocks for part in _block(block, folder, level) if part]


def _block(block: Block, folder: Path, level: int) -> list[str]:
    if isinstance(block, Section):
        inside = markdown(block.blocks, folder, level + 1)
        return [f"{'#' * level} {_one_line(block.title)}", *inside]
    if isinstance(block, Text):
        return [without_html(block.text)]
    if isinstance(block, Table):
        return [table(block.headers, block.rows), _caption(block.caption)]
    if isinstance(block, Picture):
        return [_picture(block.path, block.caption, folder)]
    if isinstance(block, Curves):
        return _curves(block, folder)
    if isinstance(block, TokenColours):
        return [_token_table(block), _caption(block.caption)]
    samples = [part for n, s in enumerate(block.samples, 1) for part in _sample(s, n, level)]
    return [_caption(block.caption), *samples]


def without_html(text: str) -> str:
    """The text with `<` and `&` shown rather than read as HTML, but inside `code`, where they are.

    Markdown lets HTML through, and a text may quote what a model wrote.
    """
    parts = re.split(r"(`[^`\n]*`)", text)
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("![", "!\\[")  # no picture


def _one_line(text: str) -> str:
    return " ".join(_escaped(text).replace("](", "]\\(").split())  # no link of a model's making


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, aligned where its cells are short."""
    lines = [[_one_line(cell) for cell in row] for row in [headers, *rows]]
    if all(len(cell) <= WIDEST_CELL for line in lines for cell in line):
        return markdown_table(lines[0], lines[1:])
    lines.insert(1, ["---"] * len(headers))
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _caption(text: str) -> str:
    return f"*{_one_line(text)}*" if text else ""


def _picture(path: Path, caption: str, folder: Path) -> str:
    link = Path(os.path.relpath(path, folder)).as_posix().replace(" ", "%20")
    label = _one_line(caption).replace("[", "\\[").replace("]", "\\]")
    return f"![{label}]({link})"


def _curves(block: Curves, folder: Path) -> list[str]:
    rows = [row for panel in block.panels for row in _curve_rows(panel)]
    headers = ["panel", "curve", "first", "last", "lowest", "highest"]
    picture = _picture(block.picture, block.caption, folder) if block.picture else ""
    return [picture, table(headers, rows), "" if picture else _caption(block.caption)]


def _curve_rows(panel: Panel) -> list[list[str]]:
    rows = []
    for line in panel.lines:
        known = [value for value in line.y if value == value]  # NaN is not itself
        shown = (known[0], known[-1], min(known), max(known)) if known else ()
        cells = [format_number(value) for value in shown] or [NOT_MEASURED] * 4
        rows.append([f"{panel.title} ({panel.unit})", line.label, *cells])
    return rows


def _token_table(block: TokenColours) -> str:
    names = list(dict.fromkeys(name for token in block.tokens for name in token.values))
    if not names:
        return ""
    largest = sorted(block.tokens, key=lambda token: -abs(token.values.get(names[0], 0.0)))
    rows = [
        [token.text.strip() or "(space)", *(format_number(token.values[n]) for n in names)]
        for token in largest[:MOST_COLOURED]
        if all(name in token.values for name in names)
    ]
    return table(["token", *names], rows)


def _sample(sample: Sample, number: int, level: int) -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", sample.prompt)), default=0))
    parts = [f"{'#' * level} Prompt {number}", f"{fence}text\n{sample.prompt}\n{fence}"]
    moments = any(frame.title for frame in sample.frames)
    notes = any(c.note for frame in sample.frames for c in frame.completions)
    headers = ["when"] * moments + ["system", "completion"] + [""] * notes
    rows = [
        [frame.title] * moments + _completion_row(completion) + [completion.note] * notes
        for frame in sample.frames
        for completion in frame.completions
    ]
    return [*parts, table(headers, rows)]


def _completion_row(completion: Completion) -> list[str]:
    return [completion.label, completion.text if completion.text.strip() else "*(empty)*"]
