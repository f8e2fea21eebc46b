"""The answer to an unknown flag: ours for one of TRL's, or why there is none, or the nearest."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import ROOT, hint

PAGE = ROOT / "docs" / "from-trl.md"  # its tables have TRL's and transformers' flags, and ours
CHANGES = ROOT / "CHANGELOG.md"  # its tables have our flags that are gone, and what to write
ROW = re.compile(r"^\| (`.+?) \| (`--.+?) \|", re.MULTILINE)
ABSENT = re.compile(r"^- ((?:`\w+`[,\s]*)+):\s(.+?)\.$", re.MULTILINE | re.DOTALL)


def page(file: Path = PAGE) -> str:
    """The text of a page; empty without it."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def replacement(name: str) -> str:
    """The changelog's words for a flag that is gone; empty for other names."""
    rows = re.findall(r"^ *\| (`--.+?) \| (.+?) \|$", page(CHANGES), re.MULTILINE)
    return next((text for flags, text in rows if f"`--{name}`" in flags), "")


def counterparts(name: str, flags: Sequence[str]) -> list[str]:
    """Those of a script's flags that do what a flag of TRL does; none if they are not all there."""
    for theirs, ours in ROW.findall(page()):
        names = re.findall(r"--(\w+)", ours)
        if f"`{name}`" in theirs and {*names} <= {*flags}:
            return names
    return []


def why_absent(name: str) -> str:
    """Why no flag does what a flag of TRL does, as the page has it; empty for other names."""
    reasons = (why for names, why in ABSENT.findall(page()) if f"`{name}`" in names)
    return " ".join(next(reasons, "").split())


def answer(words: Sequence[Any], flags: Sequence[str]) -> str:
    """Unknown flags or keys as the end of the sentence that refuses them, the first answered.

    The words are as they were given, with dashes and value or without.
    """
    word, others = words[0], ", ".join(str(word).partition("=")[0] for word in words[1:])
    name = str(word).lstrip("-").partition("=")[0].replace("-", "_")
    if ours := counterparts(name, flags):
        here = " and ".join(f"--{flag}" for flag in ours)
        advice = f": TRL's {name} is {here} here, see docs/from-trl.md"
    elif why := why_absent(name):
        advice = f": TRL's {name} is not here: {why}; see docs/from-trl.md"
    elif text := replacement(name):
        advice = f": it is gone, write {text}; see CHANGELOG.md"
    elif name.endswith((".yaml", ".yml")):
        advice = f": a recipe is given as --config {word}"
    else:
        advice = f" ({hint(name, flags)})"
    return f"{word!r}{advice}" + (f"; also unknown: {others}" if others else "")
