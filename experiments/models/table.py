"""What was seen, as text: a cell in words, and a table with the flag to use."""

import re
from collections.abc import Mapping
from typing import Any

from common.report import markdown

Row = dict[str, Any]
FLAGS = {"shared_prefix": "default", "padded": "`--layout padded`", "": "none"}
# Of sentences that differ by the model only
VARYING = {
    r"(\bthe )?\b\w+(For|LMHead)\w+|\b\w+Attention": "the model",
    r"'FOLDER' is an? \S+ model": "it is a model",
    r" by [-+.\de]+| \(rounding[^)]*\)": "",
}


def cells(row: Row, layout: str) -> dict[str, Row]:
    """The results in a layout, by cell."""
    return {each["cell"]: each for each in row["results"] if each["layout"] == layout}


def layout_of(row: Row) -> str:
    """The first layout in which SFT is right; empty if it is in none."""
    right = (n for n in FLAGS if cells(row, n).get("SFT", {}).get("kind") == "right")
    return next(right, "")


def outcome(result: Row) -> str:
    """What a cell shows, in words."""
    number = f"the largest difference is {result.get('value', 0.0):.1e}"
    return f"{result['kind']} ({result.get('text') or number})"


def page(rows: Mapping[str, Row]) -> str:
    """A table with a row for each type, the sentences that it numbers, and types without one."""
    lines, notes, others = [], dict[str, int](), dict[str, list[str]]()

    def noted(result: Row) -> str:
        text = outcome(result).partition(" ")[2][1:-1]
        for pattern, replacement in VARYING.items():
            text = re.sub(pattern, replacement, text)
        return f"{result['kind']} ({notes.setdefault(text, len(notes) + 1)})"

    for name, row in rows.items():
        if reason := row.get("not a decoder"):
            others.setdefault(reason, []).append(f"`{name}`")
            continue
        layout = layout_of(row)
        results = cells(row, layout or "padded")
        values = [each["value"] for each in results.values() if each["kind"] == "right"]
        texts: dict[str, list[str]] = {}
        for cell, each in results.items():
            if each["kind"] != "right":
                texts.setdefault(noted(each), []).append(cell)
        if layout != "shared_prefix" and (shared := cells(row, "shared_prefix").get("SFT")):
            texts.setdefault(noted(shared), []).append("the default layout")
        others_text = "; ".join(f"{', '.join(v)}: {k}" for k, v in texts.items())
        largest = f"{max(values):.0e}" if values else "-"
        lines.append([f"`{name}`", FLAGS[layout], largest, f"{others_text} {row['end']}".strip()])
    text = markdown.table(["model type", "layout", "largest difference", "not right"], lines)
    text += "\n\n" + "\n".join(f"{number}. {note}" for note, number in notes.items())
    return text + "".join(f"\n\nNo row: {', '.join(v)} ({k})." for k, v in others.items())
