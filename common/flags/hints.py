"""What an unknown flag is answered: ours for one of TRL, the script that has it, or one like it."""

import difflib
import importlib
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

from common.errors import OTHERWISE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "from-trl.md"  # the only table; without it answers are of our flags only
ROW = re.compile(r"\| `(\w+)` \| (.+?) \| (.+) \|")


class Row(NamedTuple):
    """A flag of TRL on the page."""

    section: str  # in lower case; the stage's name in its own section
    flag: str
    here: str  # our flags, as "--lora_r"; a dash where there is none
    note: str


def answer(words: Sequence[Any], cls: type[Any], known: Sequence[str]) -> str:
    """Unknown flags or keys as the end of the sentence that refuses them, the first answered.

    Args:
        words: As they were given, with dashes and value or without.
        cls: The config class of the script, which may be a `stage`.
        known: The script's flags, in their order.
    """
    name = str(words[0]).lstrip("-").partition("=")[0].replace("-", "_")
    rows = read_page()
    own = [row for row in rows if row.section == getattr(cls, "stage", "").lower()]
    is_own = any(row.flag == name for row in own)
    told = f" ({OTHERWISE})"
    if name.endswith((".yaml", ".yml")):
        told = f": a recipe is given as --config {words[0]}"
    elif not is_own and (scripts := having({name})):
        told = f": a flag of {scripts}"
    elif meant := likely(name.lower(), known, [row.flag for row in rows]):
        row = next((row for row in [*own, *rows] if row.flag == meant), None)
        told = (
            f" (did you mean {meant}?)" if meant in known or not row else of_trl(row, name, known)
        )
    others = ", ".join(str(word).partition("=")[0] for word in words[1:])
    return f"{words[0]!r}{told}" + (f"; also unknown: {others}" if others else "")


def of_choice(flag: str, value: str, choices: Sequence[str], cls: type[Any]) -> str:
    """The end of a sentence that refuses a choice: TRL's note on it, or one spelt almost so."""
    stage = getattr(cls, "stage", "").lower()
    rows = sorted(read_page(), key=lambda row: row.section != stage)
    note = next((row.note for row in rows if row.flag == flag), "")
    if value in re.findall(r"\w+", note):
        return f"; from TRL: {note}; see docs/{PAGE.name}"
    close = difflib.get_close_matches(value, choices, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def likely(name: str, known: Sequence[str], rows: Sequence[str]) -> str:
    """The flag that a name was meant to be, ours before one of TRL's; empty if none is likely.

    First initials (lr) and beginnings of ours (model), then what is spelt almost so, what has ours
    in it (lora_rank), and at last what is alike or the end of ours (epochs).
    """
    every = [*known, *rows]
    ways: Iterable[Iterable[str]] = (
        (f for f in every if f == name),
        (f for f in known if name == "".join(word[0] for word in f.split("_"))),
        (f for f in known if f.replace("_", "").startswith(name.replace("_", ""))),
        difflib.get_close_matches(name, every, 1, cutoff=0.9),
        (f for f in known if name.startswith(f) or name.endswith(f"_{f}")),
        difflib.get_close_matches(name, every, 1, cutoff=0.7),
        (f for f in known if f.endswith(f"_{name}")),
    )
    return next(itertools.chain(*ways), "")


def read_page() -> list[Row]:
    """The rows of all tables, without their marks."""
    rows, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else ():
        if line.startswith("## "):
            section = line.removeprefix("## ").lower()
        elif found := ROW.fullmatch(line):
            rows.append(Row(section, *(cell.replace("`", "") for cell in found.groups())))
    return rows


def of_trl(row: Row, name: str, known: Collection[str]) -> str:
    """A row as the end of a sentence about the flag `name`."""
    whose = "TRL's" if row.flag == name else f"TRL's {row.flag}"
    ours = set(re.findall(r"--(\w+)", row.here))
    where = "" if ours <= set(known) else f" of {having(ours)}"
    what = f"; here it is {row.here.replace(', ', ' and ')}{where}" if ours else ", with none here"
    return f": {whose}{what} ({row.note}); see docs/{PAGE.name}"


def having(names: set[str]) -> str:
    """The scripts that have all these flags."""
    scripts = [*sorted(ROOT.glob("train_*.py")), ROOT / "evaluate.py"]
    flags = {s.name: {f.name for f in fields(config_class(s.name))} for s in scripts}
    return ", ".join(name for name, own in flags.items() if names <= own)


def config_class(script: str) -> type[Any]:
    """What the flags of a script become: what its `main` takes."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    return cast(type[Any], get_type_hints(module.main)["config"])
