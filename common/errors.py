"""User errors: the exceptions, and the wording of their sentences."""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERWISE = "see --help for the flags"  # the hint where no name is alike


class UserError(ValueError):
    """A mistake of the user: a run prints it as one sentence and exits with status 2."""

    def __init__(self, sentence: str) -> None:
        """Take a sentence; what it quotes may have line breaks."""
        super().__init__(" ".join(sentence.split()))


class EngineError(UserError):
    """An engine that samples is not there, or what it answers cannot be used."""


def gist(error: BaseException) -> str:
    """The first sentence of an exception on one line, without its full stop."""
    text = str(error).strip() or type(error).__name__
    return first_sentence(f"there is no {text}" if isinstance(error, KeyError) else text)


def first_sentence(text: str) -> str:
    """The first sentence of a text on one line, without its full stop."""
    return " ".join(text.split()).split(". ")[0][:240].rstrip(".")


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
