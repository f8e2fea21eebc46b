"""Report blocks as one HTML page that needs nothing else: no network, no other file.

Every text that comes from data is escaped by the template. A policy of the page (CSP) lets only the
page's own script run and nothing be loaded, so a text that slips through is inert too.
"""

import base64
import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.record.terminal import NOT_MEASURED
from common.report import curves
from common.report.blocks import Block, SampleBrowser, Section, Table
from common.report.plots import COLOURS

FOLDER = Path(__file__).parent
NUMBER = re.compile(r"^(\[|[<>] )?[-+\u2212]?[\d,]*\.?\d")  # an interval or a bound too
INTERVAL = re.compile(r"\s*(\[[^\[\]]*\])$")
SAFE_LINK = re.compile(r"^(https?://|(?!//)[\w.#/%-]+$)")  # //host leads to another site
WIDE = 1.8  # a picture this many times as wide as high keeps a readable size on a phone


def page(title: str, facts: Mapping[str, str], blocks: Sequence[Block]) -> str:
    """The whole document; facts stand below the title."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markdown_it import MarkdownIt
    from markupsafe import Markup, escape

    markdown = MarkdownIt("zero").enable(["list", "emphasis", "backticks", "link"])
    markdown.validateLink = lambda url: bool(SAFE_LINK.match(url))  # type: ignore[method-assign]
    environment = Environment(
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        loader=FileSystemLoader(FOLDER),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "coloured_by": coloured_by,
        "drawings": lambda panels: filter(None, map(curves.drawing, panels)),
        "kind": lambda block: type(block).__name__,
        "line": lambda text: Markup(markdown.renderInline(printable(text))),
        "muted": lambda cell: Markup(
            INTERVAL.sub(r' <span class="interval">\1</span>', str(escape(printable(cell))))
        ),
        "numeric": numeric,
        "paragraphs": lambda text: Markup(markdown.render(printable(text))),
        "png": png,
        "slug": slug,
        "tenths": "{:.1f}".format,
    }
    environment.tests["section"] = lambda block: isinstance(block, Section)
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        title=title,
        facts=facts,
        blocks=blocks,
        box=curves.BOX,
        colours=COLOURS,
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def printable(text: str) -> str:
    """Text of several lines in which what a screen would obey or not show is replaced."""
    kept = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(kept)


def slug(title: str) -> str:
    """A heading as the name of its place in the page."""
    return re.sub(r"\W+", "-", title.lower()).strip("-") or "section"


def numeric(table: Table) -> list[bool]:
    """Of each column whether it has numbers, and nothing else but what stands for none."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.headers))]
    return [
        any(map(NUMBER.match, column))
        and all(NUMBER.match(cell) or cell.strip() in ("", NOT_MEASURED, "-") for cell in column)
        for column in columns
    ]


def png(path: Path) -> dict[str, Any]:
    """A picture as text, with its size in pixels."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])  # the first chunk of a PNG
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"source": source, "width": width, "height": height, "is_wide": width > WIDE * height}


def coloured_by(block: SampleBrowser) -> list[str]:
    """The names of the values of tokens, in the order of the tokens that have most."""
    completions = [c for s in block.samples for each in s.frames.values() for c in each]
    tokens = sorted((t for c in completions for t in c.tokens), key=lambda t: -len(t.values))
    return list(dict.fromkeys(name for token in tokens for name in token.values))
