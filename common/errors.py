"""User errors: the exception, the wording of its sentence, and checks of a field's values."""

import dataclasses
import difflib
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OTHERWISE = "see --help for the flags"  # the hint where no name is alike
SMALLEST_TEMPERATURE = 1e-6  # logits are divided by it
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # see `operator`


class UserError(ValueError):
    """A mistake of the user: a run prints it as one sentence and exits with status 2."""

    def __init__(self, sentence: str) -> None:
        """Take a sentence; what it quotes may have line breaks."""
        super().__init__(" ".join(sentence.split()))


class EngineError(UserError):
    """An engine that samples is not there, or what it answers cannot be used."""


def gist(error: BaseException) -> str:
    """The first sentence of an exception on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    return text.split(". ")[0][:240].rstrip(".")


def hint(name: str, names: Iterable[str], otherwise: str = OTHERWISE) -> str:
    """A suggestion for an unknown name: the closest of the names."""
    close = difflib.get_close_matches(name, list(names), 1)
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
        for item in values_of(config, f):
            if needed := missed(item, **f.metadata):
                raise UserError(f"--{f.name} is {item!r}; it must be {needed}.")
        if f.metadata["is_path"]:
            paths = [path.rstrip("/") or path for path in values_of(config, f)]
            setattr(config, f.name, paths if isinstance(value, list) else paths[0])


def missed(value: Any, choices: Sequence[Any] | None, bounds: Mapping[str, float], **_: Any) -> str:
    """The requirement that a value misses; empty if it meets all."""
    if choices and value not in choices:
        return f"one of {choices}"
    if not all(getattr(operator, name)(value, bound) for name, bound in bounds.items()):
        return " and ".join(f"{WORDS[name]} {bound:,}" for name, bound in bounds.items())
    return ""
