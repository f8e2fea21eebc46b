"""User errors: the exceptions, and the wording of their sentences."""

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_NAMED = 8  # rows in a message
NO_ROOM = (
    *("No space left on device", "Disk quota exceeded", "File too large"),  # as the system has it
    "No usable temporary directory found",  # of `tempfile`, which tries to write into each
)


class UserError(ValueError):
    """A mistake of the user: a run prints it as one sentence and exits with status 2."""

    is_on_all_ranks = False  # `distributed.together` has raised it

    def __init__(self, sentence: str) -> None:
        """Take a sentence; what it quotes may have line breaks."""
        super().__init__(" ".join(sentence.split()))

    def add(self, text: str) -> None:
        """Add a text to the end of the sentence."""
        self.args = (f"{self.args[0].removesuffix('.')}{text.removesuffix('.')}.",)


def of_full_disk(error: BaseException | None) -> UserError | None:
    """The UserError for what a disk without room caused, be it several exceptions ago; else None.

    By its words: tokenizers and safetensors raise exceptions that are no OSError.
    """
    while error is not None and not isinstance(error, UserError):
        if any(reason in str(error) for reason in NO_ROOM):
            return UserError(f"a disk, or the temporary folder (TMPDIR), is full: {gist(error)}.")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


class EngineError(UserError):
    """An engine that samples is not there, or what it answers cannot be used."""


class FunctionError(UserError):
    """A user's function raised: the traceback follows the sentence, and the exit status is 1."""

    traceback = ""

    def __str__(self) -> str:
        """The sentence, and below it the traceback."""
        return f"{self.args[0]}\n{self.traceback}".rstrip()


@contextmanager
def naming(title: str, where: str = "", *, is_ours: bool = False) -> Iterator[None]:
    """Name a user's function and its place in the UserError inside, or else in a FunctionError.

    Of a function that `is_ours` only UserErrors are changed.
    """
    where = f" ({where})" if where else ""
    try:
        yield
    except UserError as error:
        if not error.is_on_all_ranks:  # it has the place of the rank that raised it first
            error.add(where)
        raise
    except BaseException as error:
        if is_ours or isinstance(error, KeyboardInterrupt):
            raise
        failure = FunctionError(f"{title} raised {type(error).__name__}: {gist(error)}{where}.")
        failure.traceback = "".join(traceback.format_exception(error))
        raise failure from error


def naming_rows(rows: Iterable[int]) -> str:
    """Rows for a message, counted from 1: the first few of those that are no filler (below 0)."""
    numbers = [str(row + 1) for row in dict.fromkeys(rows) if row >= 0] or ["none"]
    return f"rows {', '.join(numbers[:MAX_NAMED])}{', ...' * (len(numbers) > MAX_NAMED)}"


def gist(error: BaseException) -> str:
    """The first sentence of an exception on one line, without its full stop."""
    text = str(error).strip() or type(error).__name__
    return first_sentence(f"there is no {text}" if isinstance(error, KeyError) else text)


def first_sentence(text: str) -> str:
    """The first sentence of a text on one line, without its full stop."""
    return " ".join(text.split()).split(". ")[0][:240].rstrip(".")


def hint(name: str, names: Iterable[str], otherwise: str = "see --help for the flags") -> str:
    """A suggestion for an unknown name: the closest of the names, if any is alike."""
    close = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {close[0]}?" if close else otherwise


def why_missing(path: str) -> str:
    """Why a path does not exist, as the end of a sentence; empty if it does, or if unknown.

    The command runs outside of the repository's root, or no run has written the model yet.
    """
    if not path or os.path.exists(path):
        return ""
    if os.path.exists(ROOT / path):
        there = f"run in the repository's root, {ROOT}"
        return f"; paths are relative to the working directory: {there}"
    run, _, folder = path.rstrip("/").rpartition("/")
    stages = {*re.findall("sft|reward|dpo|grpo", os.path.basename(run))}
    may_be_id = "/" not in run and not stages  # of the hub
    if not run or folder != "model" or may_be_id:
        return ""
    script = f"train_{stages.pop()}.py" if len(stages) == 1 else "a training script"
    return f"; {script} with --output_dir {run} writes it"
