"""Output in a terminal: numbers and aligned tables."""

import io
import math
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import UserError, of_full_disk

NOT_MEASURED = "\N{EN DASH}"
LINE_BREAK = re.compile(r"\r\n|[\n\v\f\r\x85\u2028\u2029]")
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
# Format characters that texts need: soft hyphen, zero width space, non-joiner and joiner, marks of
# a direction (which reorder no letters), word joiner; and Arabic signs of numbers, which are seen.
SPELLING = frozenset(
    "\u00ad\u200b\u200c\u200d\u200e\u200f\u061c\u2060"
    "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u0890\u0891\u08e2"
)
EMPTY = "(empty)"
SHOWN = 120  # characters of a text in `wrapped_table`


def format_number(value: float) -> str:
    """A number as text: about four significant digits, no exponent where it can be avoided.

    Examples: 12,346; 123.5; 1.235; 0.01235; 3.0e-05.
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def about(value: float, digits: int = 2) -> str:
    """A number as text, rounded to so many significant digits."""
    return format_number(float(f"{value:.{digits}g}"))


def format_seconds(seconds: float) -> str:
    """A time as text, in the unit that suits it: 0.35 s, 45 s, 6 min, 3.5 h, 12 days."""
    units = ((1.0, "s", 90), (60.0, "min", 90), (3600.0, "h", 48), (86400.0, "days", math.inf))
    size, unit, _ = next(u for u in units if seconds / u[0] < u[2])
    return f"{about(seconds / size)} {unit}"


def format_cell(value: Any) -> str:
    """One line: numbers shortened, line breaks shown, control characters replaced, None a dash."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, float):
        return format_number(value)
    return printable(LINE_BREAK.sub("\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", str(value)))


def printable(text: str, controls: str = "") -> str:
    """Text in which characters that a screen would obey, or hide, are replaced.

    These are controls but for `controls`, what overrides or embeds a direction of writing, lone
    surrogates, and characters without a meaning in Unicode. Spaces of every kind stay, and so does
    what words of Persian, Hindi or Khmer and emojis are spelled with.
    """
    hidden = (ord(c) for c in set(text) if c not in controls and not is_written(c))
    return text.translate(dict.fromkeys(hidden, "\N{REPLACEMENT CHARACTER}"))


def is_written(character: str) -> bool:
    """Whether texts are written with the character; Python calls spaces but " " unprintable."""
    is_space = unicodedata.category(character) == "Zs"
    return is_space or character.isprintable() or character in SPELLING


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has spaces and invisible characters only."""
    return all(character.isspace() or character in SPELLING for character in text)


def line_width() -> int:
    """Characters of a line in the terminal; 80 where there is none, as in a log file."""
    return shutil.get_terminal_size((80, 24)).columns


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned Markdown table: first column to the left, the others to the right; `|` escaped."""
    cells = [[format_cell(cell).replace("|", "\\|") for cell in row] for row in [headers, *rows]]
    widths = [max(3, max(len(row[i]) for row in cells)) for i in range(len(headers))]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in aligned)


def folded(text: str, width: int, indent: str = "") -> str:
    """Text with lines of at most `width` characters; `indent` begins those that go on."""
    lines = text.split("\n")
    return "\n".join(textwrap.fill(line, width, subsequent_indent=indent) for line in lines)


def wrapped_table(rows: Sequence[dict[str, Any]], width: int) -> str:
    """A table at most `width` wide where long texts wrap inside their column.

    Columns are the keys of the rows, in order of first appearance; a missing key is an en dash.
    Heads break after a slash. Of a long prompt (a column whose name starts with "prompt") the end
    is shown, with its cue, of any other text the beginning; a blank one is `EMPTY`.
    """
    columns = []
    for name in dict.fromkeys(key for row in rows for key in row):
        is_number = all(isinstance(row.get(name), int | float | None) for row in rows)
        texts = [format_cell(row.get(name)).strip() for row in rows]
        texts = [EMPTY if is_blank(text) else text for text in texts]
        if name.startswith("prompt"):
            texts = [t if len(t) <= SHOWN else ELLIPSIS + t[-SHOWN:] for t in texts]
        else:
            texts = [t if len(t) <= SHOWN else t[:SHOWN] + ELLIPSIS for t in texts]
        head = format_cell(name).replace("/", "/\n")
        columns.append(([head, *texts], "right" if is_number else "left"))
    return grid(columns, width)


def grid(columns: Sequence[tuple[Sequence[str], Any]], width: int) -> str:
    """Columns as text with a rule below their heads: head and cells of each, and their side."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

    rule_below_head = Box("    \n    \n -- \n" + 5 * "    \n", ascii=True)
    table = Table(box=rule_below_head, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for (head, *_), side in columns:
        table.add_column(head, justify=side, overflow="fold")
    for row in zip(*(cells for (_, *cells), _ in columns), strict=True):
        table.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def keep_printing() -> None:
    """Print characters outside the terminal's encoding as escapes from now on."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # and not a replacement of it
            stream.reconfigure(errors="backslashreplace")


def run_command(main: Callable[[], None]) -> None:
    """Run a command without a process group; a UserError or a full disk ends it with status 2."""
    keep_printing()
    try:
        main()
    except Exception as error:
        refusal = error if isinstance(error, UserError) else of_full_disk(error)
        if refusal is None:
            raise
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
