"""A report in two files: `report.html`, one page that needs nothing else, and `report.md`.

Whoever has something to show builds blocks and calls `write_page`; how they look is decided here
with `page.html`, and in `markdown.py`. Every text that comes from data is escaped by the template.
A policy of the page (CSP) lets only the page's own script run and nothing be loaded, so a text that
slips through is inert too.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from common.record.run_folder import ENVIRONMENT, read_config
from common.record.terminal import EMPTY, NOT_MEASURED, is_blank, printable
from common.report import markdown
from common.report.blocks import Block, Section, Table

FOLDER = Path(__file__).parent
NUMBER = re.compile(r"^([\[(]|[<>] )?[-+\u2212]?[\d,]*\.?\d")  # an interval, seeds, a bound too
INTERVAL = re.compile(r"\s*(\[[^\[\]]*\])$")
SAFE_LINK = re.compile(r"^(https?://|(?!//)[\w.#/%-]+$)")  # //host leads to another site
WIDE = 750  # pixels: such a picture scrolls on a phone, narrower ones stand side by side


def write_page(
    output_dir: str | Path, title: str, blocks: Sequence[Block], facts: Mapping[str, str]
) -> list[Path]:
    """Write `report.html` and `report.md`, with the facts below the title. Rank 0 only."""
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    files = {
        output_dir / "report.html": html_page(title, facts, blocks),
        output_dir / "report.md": markdown.page(title, facts, blocks, output_dir),
    }
    for file, text in files.items():
        # A lone surrogate, which JSON may hold, is no character that a file could.
        file.write_bytes(text.encode("utf-8", "replace"))
    return list(files)


def run_facts(run_dir: Path) -> dict[str, str]:
    """Seed, date, commit and GPU of a run, as far as its own files say; no clock is read."""
    config, environment = read_config(run_dir), read_config(run_dir, ENVIRONMENT)
    commit, dirty, _ = (environment.get("git_commit") or "").partition("-dirty")
    facts = {
        "seed": config.get("seed"),
        "started": environment.get("started"),
        "commit": commit[:10] + dirty,
        "GPU": environment.get("gpu"),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


# --- HTML ---


def html_page(title: str, facts: Mapping[str, str], blocks: Sequence[Block]) -> str:
    """The whole document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markdown_it import MarkdownIt
    from markupsafe import Markup, escape

    small = MarkdownIt("zero").enable(["list", "emphasis", "backticks", "link"])
    small.validateLink = lambda url: bool(SAFE_LINK.match(url))  # type: ignore[method-assign]
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(FOLDER),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    sections = [block.title for block in blocks if isinstance(block, Section)]
    muted = r' <span class="interval">\1</span>'
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "line": lambda text: Markup(small.renderInline(text)),
        "muted": lambda cell: Markup(INTERVAL.sub(muted, str(escape(cell)))),
        "numeric": numeric,
        "paragraphs": lambda text: Markup(small.render(text)),
        "png": png,
        "slug": anchors(sections).__getitem__,
    }
    environment.tests["blank"] = is_blank
    environment.globals["empty"] = EMPTY
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    text = environment.get_template("page.html").render(
        title=title,
        facts=facts,
        blocks=blocks,
        sections=sections,
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return printable(text, controls="\n\t")


def anchors(titles: Sequence[str]) -> dict[str, str]:
    """The anchor of each title: its letters and digits, with a number where others have these."""
    found: dict[str, str] = {}
    for title in dict.fromkeys(titles):
        slug = re.sub(r"\W+", "-", title.lower()).strip("-") or "section"
        free = (f"{slug}{end}" for end in chain([""], (f"-{n}" for n in count(2))))
        found[title] = next(name for name in free if name not in found.values())
    return found


def numeric(table: Table) -> list[bool]:
    """Of each column whether it has numbers, and nothing else but what stands for none."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.headers))]
    return [
        any(map(NUMBER.match, column))
        and all(NUMBER.match(cell) or cell.strip() in ("", NOT_MEASURED, "-") for cell in column)
        for column in columns
    ]


def png(path: Path) -> dict[str, Any]:
    """A picture as text with its size in pixels."""
    from PIL import Image

    with Image.open(path) as image:
        width, height = image.size
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"source": source, "width": width, "height": height, "is_wide": width >= WIDE}
