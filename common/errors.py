"""What a user can put right, told in one sentence: the error, and refusals of paths and numbers.

Paths are looked at before anything is read from them or written to them. Of numbers is refused here
what no computer can do, as a step of 10^30 rows, and what float32 turns into 0 or an infinity; what
a single field excludes beyond that is refused where the field is defined.
"""

import dataclasses
import math
import os
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONGEST_SENTENCE = 1000  # characters, which long paths may need
KEPT_END = 200  # of them at the end, where the sentence says what is allowed
WORD = re.compile(r"(\S{60})\S{240,}")  # longer than most paths

_short = reprlib.Repr()
# A value as nested YAML aliases make it has 10^7 items in 200 characters of text.
_short.maxlevel, _short.maxlist, _short.maxdict = 2, 3, 3
_short.maxstring = _short.maxother = _short.maxlong = 60


class UserError(ValueError):
    """Something the user can put right: a run prints it as one sentence and exits with status 2."""

    def __init__(self, sentence: str) -> None:
        """Take a sentence, which may quote anything: it is made printable, short, and one line."""
        super().__init__(cut(printable(sentence)))


def printable(text: str) -> str:
    """Text with escapes, as Python writes them, for line breaks, control codes and half pairs."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def cut(text: str) -> str:
    """Text without what makes a word or the whole of it longer than a sentence may be."""
    text = WORD.sub(r"\1(...)", text)
    if len(text) <= LONGEST_SENTENCE:
        return text
    mark = "(...)"
    return text[: LONGEST_SENTENCE - KEPT_END - len(mark)] + mark + text[-KEPT_END:]


def shown(value: object) -> str:
    """A value as Python writes it, without the middle of what is long or deep."""
    try:
        return _short.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of more than 4,300 digits"


def gist(error: BaseException) -> str:
    """The first sentence of an exception on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    return text.split(". ")[0][:240].rstrip(".")


# ---- paths ---

LONGEST_SHOWN = 100  # characters of a path in a sentence
WRITTEN_FOLDERS = (
    *("model", "model.partial", "adapter", "adapter.partial", "checkpoints", "failed", "plots"),
    *("profile", "wandb"),
)
WRITTEN_FILES = (
    *("config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "results.json"),
    *("pairs.jsonl", "scores.jsonl", "completions.jsonl", "report.md", "report.html", ".lock"),
    *("plots/curves.png", "plots/summary.png", "plots/calibration.png"),
)


def refuse_unreachable(flag: str, path: str) -> None:
    """Raise a UserError for a link to nothing and for what cannot be looked at or read.

    That is a loop of links, a name that is too long, what there is no permission for. A path that
    is not there passes: it may be made, or be a hub id.
    """
    shown = path if len(path) <= LONGEST_SHOWN else f"{path[:LONGEST_SHOWN]}(...)"
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise UserError(
                f"--{flag} {shown} is a link to what is not there; name a file or folder."
            ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--{flag} {shown} cannot be looked at ({reason}); name a file or folder that can."
        ) from None
    refuse_forbidden(flag, path, os.R_OK)


def refuse_twice(flag: str, names: Sequence[str]) -> None:
    """Raise a UserError for one folder, or one hub id, under two names or twice under one."""
    found: dict[str, str] = {}
    for name in names:
        place = os.path.realpath(name)
        if place in found:
            raise UserError(
                f"--{flag} has {found[place]!r} and {name!r}, which are the same; each must be "
                "given once."
            )
        found[place] = name


def refuse_unwritable(flag: str, path: str) -> None:
    """Raise a UserError for a folder in which a run could not write. Makes nothing.

    A file where the trained model belongs, or a folder where its curves do, would be noticed after
    the training.
    """
    folder = Path(path).absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise UserError(f"--{flag} {path} needs {nearest} to be a folder, and it is none.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"--{flag} {path} cannot be written: {nearest} allows no new files; name another "
            "folder."
        )
    for name in ("model", "adapter"):
        place = Path(os.path.realpath(folder / name))
        is_fixed = os.path.ismount(place) or not os.access(place.parent, os.W_OK | os.X_OK)
        if (folder / name).is_symlink() and is_fixed:
            raise UserError(
                f"--{flag} {path} holds {name!r}, a link to {place}, which cannot be replaced; let "
                "it point to a folder inside one that can be written."
            )
    for name in WRITTEN_FOLDERS:
        is_awaited = name in ("model", "adapter") and not (folder / name).exists()  # by a link
        if os.path.lexists(folder / name) and not (folder / name).is_dir() and not is_awaited:
            raise UserError(
                f"--{flag} {path} holds a file {name!r} where a folder is to be written; "
                "remove it or name another folder."
            )
        refuse_forbidden(flag, folder / name, os.R_OK | os.W_OK)
    for name in WRITTEN_FILES:
        if (folder / name).is_dir():
            raise UserError(
                f"--{flag} {path} holds a folder {name!r} where a file is to be written; remove it "
                "or name another folder."
            )
        refuse_forbidden(flag, folder / name, os.R_OK | os.W_OK)


def refuse_forbidden(flag: str, path: str | Path, access: int) -> None:
    """Raise a UserError for a file or folder that is there and may not be read (and written)."""
    needed = access | os.X_OK if os.path.isdir(path) else access
    if os.path.exists(path) and not os.access(path, needed):
        what = "read and written" if access & os.W_OK else "read"
        raise UserError(
            f"--{flag}: {path} may not be {what} by this user; let it be, or name another."
        )


# ---- numbers ---

LARGEST_COUNT = 2**31 - 1  # of tokens, rows, steps, seconds
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of the normal numbers of float32
SMALLEST_TEMPERATURE = 1e-6  # logits are divided by it
COUNTED_IN_FRACTIONS = ("num_train_epochs",)
NO_COUNTS = ("seed",)


def refuse_beyond_range(config: Any) -> None:
    """Raise a UserError for a number, alone or in a list, that no field of its kind may hold.

    Whole numbers are counts. Other numbers take part in float32 arithmetic: 0 is allowed here, and
    NaN and infinities are left to those who know what the field needs.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if isinstance(number, float) and (number == 0 or not math.isfinite(number)):
                continue
            refuse_beyond(f.name, number)


def refuse_beyond(name: str, number: float) -> None:
    """Raise a UserError for a number that the field may not hold."""
    is_count = isinstance(number, int) or name in COUNTED_IN_FRACTIONS
    if is_count and name not in NO_COUNTS and number > LARGEST_COUNT:
        raise UserError(f"--{name} is {shown(number)}; it must be at most {LARGEST_COUNT:,}.")
    if isinstance(number, int):
        return
    if name.endswith("temperature") and 0 < number < SMALLEST_TEMPERATURE:
        raise UserError(f"--{name} is {number}; it must be at least {SMALLEST_TEMPERATURE:g}.")
    if not SMALLEST <= abs(number) <= LARGEST:
        raise UserError(
            f"--{name} is {number}; in size it must lie between {SMALLEST:.3g} and {LARGEST:.3g}, "
            "the numbers of float32."
        )
