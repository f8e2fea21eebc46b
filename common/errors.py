"""What a user can put right, told in one sentence."""

import re
import reprlib
import sys
from collections.abc import Callable

from common.terminal import keep_printing

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


def run_command(main: Callable[[], None]) -> None:
    """Run what needs no process group; a `UserError` ends it with its sentence and status 2."""
    keep_printing()
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


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
