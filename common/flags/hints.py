"""What an unknown flag is answered: ours for one of TRL, the script that has it, or one like it."""

import difflib
import importlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

from common.errors import hint

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "from-trl.md"  # the only table; without it answers are of our flags only
ROW = re.compile(r"\| `(\w+)` \| (.+?) \| (.+) \|")


class Row(NamedTuple):
    """A flag of TRL on the page."""

    section: str  # in lower case; the stage's name in its own section
    flag: str
    here: str  # our flags, as "--lora_r"; a dash where there is none
    note: str


def answer(word: Any, cls: type[Any], known: Collection[str]) -> str:
    """What follows an unknown flag or key in the sentence that refuses it.

    Args:
        word: As it was given, with dashes and value or without.
        cls: The config class of the script, which may be a `stage`.
        known: The script's flags.
    """
    name = str(word).lstrip("-").partition("=")[0].replace("-", "_")
    rows = read_page()
    own = [row for row in rows if row.section == getattr(cls, "stage", "").lower()]
    is_own = any(row.flag == name for row in own)
    if not is_own and (scripts := having({name})):
        return f": a flag of {scripts}"
    # One that is mistyped may be TRL's too
    close = difflib.get_close_matches(name, [*known, *(row.flag for row in rows)], 1)
    for meant in (name, *close):
        for row in [*own, *rows]:
            if row.flag == meant and meant not in known:
                return told(row, name, known)
    return f" ({hint(word, known)})"


def read_page() -> list[Row]:
    """The rows of all tables, without their marks."""
    rows, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else ():
        if line.startswith("## "):
            section = line.removeprefix("## ").lower()
        elif found := ROW.fullmatch(line):
            rows.append(Row(section, *(cell.replace("`", "") for cell in found.groups())))
    return rows


def told(row: Row, name: str, known: Collection[str]) -> str:
    """A row as the end of a sentence about the flag `name`."""
    whose = "TRL's" if row.flag == name else f"TRL's {row.flag}"
    ours = set(re.findall(r"--(\w+)", row.here))
    where = "" if ours <= set(known) else f" of {having(ours)}"
    what = f"; here it is {row.here.replace(', ', ' and ')}{where}" if ours else ", with none here"
    return f": {whose}{what} ({row.note}); see docs/{PAGE.name}"


def having(names: set[str]) -> str:
    """The scripts that have all these flags."""
    scripts = [*sorted(ROOT.glob("train_*.py")), ROOT / "evaluate.py"]
    found = [s.name for s in scripts if names <= set(config_class(s.name).__dataclass_fields__)]
    return ", ".join(found)


def config_class(script: str) -> type[Any]:
    """What the flags of a script become: what its `main` takes."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    return cast(type[Any], get_type_hints(module.main)["config"])
