"""Text as HTML: everything that comes from data passes through `shown`."""

import re
from html import escape

SAFE_LINK = re.compile(r"^(https?://|(?!//)[\w.#/%-]+$)")  # //host leads to another site


def printable(text: str) -> str:
    """Text of several lines in which what a screen would obey or not show is replaced."""
    kept = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(kept)


def shown(text: str) -> str:
    """Data as HTML text or attribute value."""
    return escape(printable(text))


def paragraphs(text: str) -> str:
    """Paragraphs and lists."""
    parts = []
    for part in re.split(r"\n\s*\n", text.strip()):
        lines = part.strip().split("\n")
        if all(re.match(r"(- |\d+\. |\s)", line) for line in lines):
            kind = "ul" if lines[0].startswith("- ") else "ol"
            items = re.split(r"^(?:- |\d+\. )", part.strip(), flags=re.MULTILINE)[1:]
            inside = "".join(f"<li>{inline(' '.join(item.split()))}</li>" for item in items)
            parts.append(f"<{kind}>{inside}</{kind}>")
        else:
            parts.append(f"<p>{inline(' '.join(lines))}</p>")
    return "\n".join(parts)


def inline(text: str) -> str:
    """A line with `code`, **bold**, *emphasis* and links to pages or relative paths."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(
        f"<code>{shown(part)}</code>" if odd else _emphasised(shown(part))
        for part, odd in zip(parts, [False, True] * len(parts), strict=False)
    )


def _emphasised(text: str) -> str:
    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        return f'<a href="{target}">{label}</a>' if SAFE_LINK.match(target) else match.group()

    text = re.sub(r"\[([^\[\]]+)\]\(([^()\s]+)\)", link, text)
    text = re.sub(r"\*\*(\S(?:.*?\S)?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"(?<![\w*])\*(\S(?:[^*]*\S)?)\*(?![\w*])", r"<em>\1</em>", text)
