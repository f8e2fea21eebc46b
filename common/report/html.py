"""Report blocks as one HTML page that needs nothing else: no network, no other file.

Everything that comes from data passes through `escape.shown`. A policy of the page (CSP) lets
only the page's own script run and nothing be loaded, so a text that slips through is inert too.
"""

import base64
import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from common.record.terminal import NOT_MEASURED
from common.report.blocks import (
    Block,
    Completion,
    Curves,
    Frame,
    Picture,
    Sample,
    SampleBrowser,
    Section,
    Table,
    Text,
    Token,
    TokenColours,
)
from common.report.curves import panel_svg
from common.report.escape import inline, paragraphs, shown
from common.report.plots import COLOURS

STYLE = Path(__file__).with_name("page.css")
SCRIPT = Path(__file__).with_name("page.js")
NUMBER = re.compile(r"^(\[|[<>] )?[-+\u2212]?[\d,]*\.?\d")  # an interval or a bound too
INTERVAL = re.compile(r"\s*(\[[^\[\]]*\])$")
WIDE = 1.8  # a picture this many times as wide as high keeps a readable size on a phone


def page(title: str, facts: Mapping[str, str], blocks: Sequence[Block]) -> str:
    """The whole document.

    Args:
        title: Of the page.
        facts: What stands below the title: data set, commit, date, seed.
        blocks: The rest.
    """
    style = _colours() + STYLE.read_text(encoding="utf-8")
    script = SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    pairs = "".join(f"<div><dt>{shown(k)}</dt><dd>{shown(v)}</dd></div>" for k, v in facts.items())
    sections = [block.title for block in blocks if isinstance(block, Section)]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{shown(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            f'<header><h1>{shown(title)}</h1><dl class="facts">{pairs}</dl></header>',
            f'<div class="columns">\n{_navigation(sections)}\n<main>',
            *(_block(block, 2) for block in blocks),
            f"</main>\n</div>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _colours() -> str:
    """The palette of the figures as CSS variables, and a class for each."""
    variables = "".join(f"--c{i}:{colour};" for i, colour in enumerate(COLOURS))
    classes = "".join(f".k{i}{{--k:var(--c{i})}}" for i in range(len(COLOURS)))
    return f":root{{{variables}}}\n{classes}\n"


def slug(title: str) -> str:
    """A heading as the name of its place in the page."""
    return re.sub(r"\W+", "-", title.lower()).strip("-") or "section"


def _navigation(titles: Sequence[str]) -> str:
    if len(titles) < 2:
        return "<nav></nav>"
    links = "".join(f'<li><a href="#{slug(t)}">{shown(t)}</a></li>' for t in titles)
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


def _block(block: Block, level: int) -> str:
    if isinstance(block, Section):
        inside = "\n".join(_block(child, level + 1) for child in block.blocks)
        name = f' id="{slug(block.title)}"' if level == 2 else ""
        heading = f"<h{min(level, 6)}>{shown(block.title)}</h{min(level, 6)}>"
        return f"<section{name}>{heading}\n{inside}\n</section>"
    if isinstance(block, Text):
        return paragraphs(block.text)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Picture):
        return _picture(block)
    if isinstance(block, Curves):
        panels = "\n".join(filter(None, map(panel_svg, block.panels)))
        return f'<div class="panels">{panels}</div>{_caption(block.caption)}'
    if isinstance(block, TokenColours):
        choice, text = _colour_choice(block.tokens), _coloured(block.tokens)
        return f'<div class="coloured">{choice}{text}{_caption(block.caption)}</div>'
    return _browser(block)


def _caption(text: str) -> str:
    return f'<p class="caption">{inline(text)}</p>' if text else ""


# --- tables and pictures ---


def _table(block: Table) -> str:
    numeric = [
        any(NUMBER.match(row[column]) for row in block.rows)
        and all(
            NUMBER.match(row[column]) or row[column].strip() in ("", NOT_MEASURED, "-")
            for row in block.rows
        )
        for column in range(len(block.headers))
    ]
    head = "".join(
        f'<th scope="col"{_number_class(is_number)}>{shown(header)}</th>'
        for header, is_number in zip(block.headers, numeric, strict=True)
    )
    rows = "".join(f"<tr>{_cells(row, numeric)}</tr>" for row in block.rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{_caption(block.caption)}"
    )


def _number_class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _cells(row: Sequence[str], numeric: Sequence[bool]) -> str:
    cells = []
    for cell, is_number in zip(row, numeric, strict=True):
        text = shown(cell)
        if is_number:
            text = INTERVAL.sub(r' <span class="interval">\1</span>', text)
        cells.append(f"<td{_number_class(is_number)}>{text}</td>")
    return "".join(cells)


def _picture(block: Picture) -> str:
    data = block.path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])  # the first chunk of a PNG
    wide = ' class="wide"' if width > WIDE * height else ""
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    image = (
        f'<img{wide} src="{source}" width="{width}" height="{height}" '
        f'alt="{shown(block.caption or block.path.stem)}">'
    )
    caption = f"<figcaption>{inline(block.caption)}</figcaption>" if block.caption else ""
    return f'<figure class="picture"><div class="scroll">{image}</div>{caption}</figure>'


# --- samples ---


def _browser(block: SampleBrowser) -> str:
    samples = "\n".join(map(_sample, block.samples))
    tokens = [
        token for s in block.samples for f in s.frames for c in f.completions for token in c.tokens
    ]
    return (
        f'<div class="browser coloured">{_caption(block.caption)}<div class="bar">'
        '<div class="leaf" hidden><button type="button" aria-label="previous prompt">'
        '\N{LEFTWARDS ARROW}</button><span class="count" aria-live="polite"></span>'
        '<button type="button" aria-label="next prompt">\N{RIGHTWARDS ARROW}</button></div>'
        f"{_colour_choice(tokens)}</div>\n{samples}</div>"
    )


def _sample(sample: Sample) -> str:
    slider = ""
    if len(sample.frames) > 1:
        last = len(sample.frames) - 1
        slider = (
            f'<label class="time" hidden><output></output><input type="range" min="0" max="{last}" '
            f'value="{last}" aria-label="moment of training"></label>'
        )
    frames = "\n".join(map(_frame, sample.frames))
    return (
        '<article class="sample"><details class="prompt" open><summary>Prompt</summary>'
        f"<pre>{shown(sample.prompt)}</pre></details>{slider}\n{frames}</article>"
    )


def _frame(frame: Frame) -> str:
    title = f"<h5>{shown(frame.title)}</h5>" if frame.title else ""
    inside = "\n".join(map(_completion, frame.completions))
    return f'<div class="frame" data-title="{shown(frame.title)}">{title}{inside}</div>'


def _completion(completion: Completion) -> str:
    kind = completion.label if completion.label in ("chosen", "rejected", "reference") else ""
    text = completion.text.strip()
    if completion.tokens:
        inside = _coloured(completion.tokens)
    elif text:
        inside = f'<p class="text">{shown(text)}</p>'
    else:
        inside = '<p class="text"><em class="empty">(empty)</em></p>'
    note = f'<span class="note">{shown(completion.note)}</span>' if completion.note else ""
    return (
        f'<div class="completion {kind}"><p class="who"><b>{shown(completion.label)}</b>{note}</p>'
        f"{inside}</div>"
    )


def _coloured(tokens: Sequence[Token]) -> str:
    """The tokens with their values in the order of the names, which are those of the first one."""
    names = list(tokens[0].values) if tokens else []
    spans = "".join(
        f'<span class="token" data-v="{",".join(f"{token.values[name]:.4g}" for name in names)}">'
        f"{shown(token.text)}</span>"
        for token in tokens
    )
    return f'<p class="text" data-names="{shown("|".join(names))}">{spans}</p>'


def _colour_choice(tokens: Sequence[Token]) -> str:
    """The choice of what colours the tokens, "" where they have no values."""
    richest = sorted(tokens, key=lambda token: -len(token.values))  # their order is the whole one
    names = list(dict.fromkeys(name for token in richest for name in token.values))
    if not names:
        return ""
    options = "".join(f'<option value="{shown(name)}">{shown(name)}</option>' for name in names)
    return (
        '<div class="colour" hidden><label>colour by <select>'
        f'<option value="">nothing</option>{options}</select></label>'
        '<span class="scale"><span></span><i></i><span></span></span></div>'
    )
