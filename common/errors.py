"""What a user can put right, told in one sentence: the error, its words, and what is refused.

Of numbers is refused what a field says, what no computer can do, as a step of 10^30 rows, and what
float32 turns into 0 or an infinity. Paths are looked at before anything is read or written.
"""

import dataclasses
import difflib
import operator
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONGEST_SENTENCE = 1000  # characters, which long paths may need
OTHERWISE = "see --help for the flags"  # the hint where no name is alike
KEPT_END = 200  # of them at the end, where the sentence says what is allowed
LONG_WORD = re.compile(r"(\S{60})\S{240,}")  # longer than most paths

LARGEST_COUNT = 2**31 - 1  # of tokens, rows, steps, seconds
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of the normal numbers of float32
SMALLEST_TEMPERATURE = 1e-6  # logits are divided by it
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # see `operator`

_short = reprlib.Repr()
# A value as nested YAML aliases make it has 10^7 items in 200 characters of text.
_short.maxlevel, _short.maxlist, _short.maxdict = 2, 3, 3
_short.maxstring = _short.maxother = _short.maxlong = 60


class UserError(ValueError):
    """Something the user can put right: a run prints it as one sentence and exits with status 2."""

    def __init__(self, sentence: str) -> None:
        """Take a sentence, which may quote anything: it is made printable, short, and one line."""
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence)
        text = LONG_WORD.sub(r"\1(...)", text)
        if len(text) > LONGEST_SENTENCE:
            text = f"{text[: LONGEST_SENTENCE - KEPT_END - 5]}(...){text[-KEPT_END:]}"
        super().__init__(text)


class EngineError(UserError):
    """An engine that samples is not there, or what it answers cannot be used."""


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


def hint(name: str, known: Iterable[str], otherwise: str = OTHERWISE) -> str:
    """What an unknown name may have been meant to be."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]}?" if close else otherwise


def why_missing(path: str) -> str:
    """Why a path is not there, as the end of a sentence; empty if it is, or for an unknown reason.

    The command runs outside of the repository, or no run has written the model yet.
    """
    if os.path.exists(path):
        return ""
    if os.path.exists(ROOT / path):
        there = f"run in the repository's root, {ROOT}"
        return f"; paths are relative to the working directory: {there}"
    run, _, folder = path.rstrip("/").rpartition("/")
    if not run or folder != "model":
        return ""
    stage = re.search("sft|reward|dpo|grpo", os.path.basename(run))
    script = f"train_{stage[0]}.py" if stage else "a training script"
    return f"; {script} with --output_dir {run} writes it"


def values_of(config: Any, f: dataclasses.Field) -> list[Any]:
    """A field's value, or the items of its list."""
    value = getattr(config, f.name)
    return value if isinstance(value, list) else [value]


def check_fields(config: Any) -> None:
    """Raise a UserError for a value that its field excludes by itself.

    A path loses the slash at its end: `model/` is the same folder as `model`.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.metadata["required"] and not value:
            raise UserError(f"--{f.name} is required: {f.metadata['help']}.")
        if isinstance(value, list) and "" in value:
            raise UserError(f"--{f.name} is {value}; no name in it may be empty.")
        for item in values_of(config, f):
            if needed := missed(item, **f.metadata):
                raise UserError(f"--{f.name} is {shown(item)}; it must be {needed}.")
        if f.metadata["is_path"]:
            paths = [path.rstrip("/") or path for path in values_of(config, f)]
            setattr(config, f.name, paths if isinstance(value, list) else paths[0])
            for path in paths:
                if path and ":" not in path:  # as in `regex:...` and `file.py:function`
                    refuse_unreachable(f.name, path)


def missed(value: Any, choices: Sequence[Any] | None, bounds: Mapping[str, float], **_: Any) -> str:
    """What a value must be and is not; empty if it is fine."""
    if choices and value not in choices:
        return f"one of {choices}"
    if isinstance(value, str):  # halves of surrogate pairs: Python's form of bytes that are no text
        return "text in UTF-8" if any("\ud800" <= c <= "\udfff" for c in value) else ""
    if not all(getattr(operator, name)(value, bound) for name, bound in bounds.items()):
        return " and ".join(f"{WORDS[name]} {bound:,}" for name, bound in bounds.items())
    if isinstance(value, int):
        is_beyond = value > LARGEST_COUNT and not bounds.keys() & {"lt", "le"}
        return f"at most {LARGEST_COUNT:,}" if is_beyond else ""
    if value and not SMALLEST <= abs(value) <= LARGEST:
        return f"finite, in size from {SMALLEST:.3g} to {LARGEST:.3g}, the numbers of float32"
    return ""


def refuse_unreachable(flag: str, path: str) -> None:
    """Raise a UserError for a link to nothing and for what cannot be looked at or read.

    That is a loop of links, a name that is too long, what there is no permission for. A path that
    is not there passes: it may be made, or be a hub id.
    """
    reason = ""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        reason = "is a link to what is not there" if os.path.islink(path) else ""
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = f"cannot be looked at ({getattr(error, 'strerror', None) or error})"
    if reason:
        raise UserError(f"--{flag} {path} {reason}; name a file or folder that can be read.")
    refuse_forbidden(flag, path, os.R_OK)


def refuse_forbidden(flag: str, path: str | Path, access: int) -> None:
    """Raise a UserError for a file or folder that is there and may not be read (and written)."""
    needed = access | os.X_OK if os.path.isdir(path) else access
    if os.path.exists(path) and not os.access(path, needed):
        what = "read and written" if access & os.W_OK else "read"
        raise UserError(
            f"--{flag}: {path} may not be {what} by this user; let it be, or name another."
        )


def refuse_twice(flag: str, names: Sequence[str]) -> None:
    """Raise a UserError for one folder, or one hub id, under two names or twice under one."""
    found: dict[str, str] = {}
    for name in names:
        place = os.path.realpath(name)
        if place in found:
            both = f"{found[place]!r} and {name!r}"
            raise UserError(f"--{flag} has {both}, which are the same; each must be given once.")
        found[place] = name
