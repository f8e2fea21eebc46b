"""What a person reads in a terminal: numbers, aligned tables, the progress bar."""

import contextlib
import io
import math
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from common.errors import UserError

NOT_MEASURED = "\N{EN DASH}"
LINE_BREAK = re.compile(r"\r\n|[\n\v\f\r\x85\u2028\u2029]")
MIN_TEXT_WIDTH = 12  # characters below which a wrapped column is no longer read


def format_number(value: float) -> str:
    """A number for people: about four significant digits, no exponent where it can be avoided.

    Examples: 12,346; 123.5; 1.235; 0.01235; 3.0e-05.
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def format_cell(value: Any) -> str:
    """A table cell of one line: numbers shortened, line breaks shown, None as an en dash.

    A model may emit anything: what a terminal would obey instead of show is replaced.
    """
    if value is None:
        return NOT_MEASURED
    if isinstance(value, float):
        return format_number(value)
    text = LINE_BREAK.sub("\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", str(value))
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned Markdown table: first column to the left, the others to the right.

    Args:
        headers: column names.
        rows: cells as text, as many as there are headers; a `|` in a cell is escaped, and what
            a terminal would obey is replaced.
    """
    cells = [[format_cell(cell).replace("|", "\\|") for cell in row] for row in [headers, *rows]]
    assert all(len(row) == len(headers) for row in cells), "a row misses a cell"
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(headers))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [_aligned(cells[0], widths), rule, *(_aligned(row, widths) for row in cells[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first = row[0].ljust(widths[0])
    return [first, *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]


def wrapped_table(rows: Sequence[dict[str, Any]], width: int, max_lines: int = 4) -> str:
    """A table at most `width` wide where long texts wrap inside their column.

    Columns are the keys of the rows, in order of first appearance; a missing key is an en dash.
    A prompt (a column whose name starts with "prompt") that needs more than `max_lines` lines loses
    its beginning, any other text its end: of a prompt, the cue at the end is what matters.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[format_cell(row.get(column)) for column in columns] for row in rows]
    headers = [format_cell(column) for column in columns]
    natural = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    widths = fitted_widths(natural, width - 2 * (len(columns) - 1))
    numeric = [
        all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns
    ]
    lines = [
        "  ".join(c[:w].ljust(w) for c, w in zip(headers, widths, strict=True)).rstrip(),
        "  ".join("-" * w for w in widths),
    ]
    for row in cells:
        blocks = [
            _wrapped(cell, widths[index], max_lines, keep_end=columns[index].startswith("prompt"))
            for index, cell in enumerate(row)
        ]
        for line in range(max(len(block) for block in blocks)):
            parts = [block[line] if line < len(block) else "" for block in blocks]
            aligned = [
                part.rjust(w) if right else part.ljust(w)
                for part, w, right in zip(parts, widths, numeric, strict=True)
            ]
            lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def fitted_widths(natural: Sequence[int], total: int) -> list[int]:
    """Narrow the widest columns, equally, until the sum is at most `total`.

    No column goes below `MIN_TEXT_WIDTH` (or its own natural width), even if the sum stays larger.
    """
    for limit in range(max(natural), MIN_TEXT_WIDTH, -1):
        if sum(min(width, limit) for width in natural) <= total:
            return [min(width, limit) for width in natural]
    return [min(width, MIN_TEXT_WIDTH) for width in natural]


def _wrapped(text: str, width: int, max_lines: int, *, keep_end: bool) -> list[str]:
    lines = textwrap.wrap(text.strip(), width) or [""]
    if len(lines) <= max_lines:
        return lines
    ellipsis = "\N{HORIZONTAL ELLIPSIS}"
    if keep_end:
        kept = lines[-max_lines:]
        return [ellipsis + kept[0][-(width - 1) :], *kept[1:]]
    kept = lines[:max_lines]
    return [*kept[:-1], kept[-1][: width - 1] + ellipsis]


class LastingFile(io.FileIO):
    """A file to which writing never fails: what it does not take is dropped."""

    def write(self, data: Any) -> int:
        """Write, if somebody still reads (`| head`) and the disk is not full."""
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def keep_printing() -> None:
    """From now on nothing that is printed ends the process, neither by whom nor by what is read.

    Characters that the terminal's encoding has not got, and halves of surrogate pairs, are shown as
    escapes. Where somebody else has replaced stdout or stderr, that stays.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(AttributeError, OSError):  # there is none, or it is no file
            stream = getattr(sys, name)
            if stream.fileno() == number:
                stream.flush()
                lasting = io.TextIOWrapper(
                    io.BufferedWriter(LastingFile(number, "w", closefd=False)),
                    encoding=stream.encoding,
                    errors="backslashreplace",
                    line_buffering=stream.line_buffering or stream.write_through,  # python -u
                )
                setattr(sys, name, lasting)


class LineStream:
    """Gives each redrawing of a bar a line of its own, for a log file, where nothing is redrawn."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def write(self, text: str) -> None:
        """Write what a bar draws, as a line."""
        text = text.strip("\r\n ")
        if text:
            self._stream.write(text + "\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def run_command(main: Callable[[], None]) -> None:
    """Run what needs no process group; a `UserError` ends it with its sentence and status 2."""
    keep_printing()
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def progress_bar(
    description: str, total: int, initial: int = 0, *, unit: str = "step", active: bool = True
) -> Any:
    """A tqdm bar on stderr; off a terminal it prints a line every 30 seconds instead.

    Args:
        description: what is going on.
        total: units to do.
        initial: units done before.
        unit: what is counted; a bar of anything but steps is inside a run and vanishes at its end.
        active: False on the ranks that print nothing.
    """
    interactive = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=initial,
        desc=description,
        unit=f" {unit}",
        file=sys.stderr if interactive else LineStream(sys.stderr),  # type: ignore[arg-type]
        dynamic_ncols=interactive,
        ascii=None if interactive else True,
        miniters=1,
        mininterval=0.2 if interactive else 30.0,
        delay=0.0 if interactive else 30.0,
        smoothing=0.1,
        leave=unit == "step",
        disable=not active,
    )


def show_status(bar: Any, text: str) -> None:
    """Say beside a bar what is happening, redrawing it at its own pace: cheap at every token."""
    bar.set_description_str(text, refresh=False)
    now = time.monotonic()
    if not bar.disable and now - getattr(bar, "shown_at", 0.0) >= bar.mininterval:
        bar.shown_at = now
        bar.refresh()
