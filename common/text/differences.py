"""Differences between two tokenizers that make a model read the same rows in other ways.

Each function returns a clause for a sentence, empty where there is no difference.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Any, NamedTuple

from common.errors import UserError
from common.text.chat import TurnEnd, as_raw, one_of_each_form, render
from common.text.example import Example
from common.text.tokenise import encode, leading_ids

# Texts that tokenizers split or normalise differently: words, numbers, white space, accents,
# ligatures, other scripts, signs. Those of the tokens themselves (`of_texts`) show merges.
TEXTS = (
    "The cat didn't sit on the mat, did it?",
    " a space ahead and behind ",
    "It cost $1,234,567.50 on 2026-11-28 (+12 %).",
    "two  or   three spaces,\ta tab\n\nand lines\r\n    def f(x): return {'a': [x ** 2]}",
    "UPPER, lower, CamelCase, snake_case, WE'LL",
    "caf\u00e9 cafe\u0301 Stra\u00dfe na\u00efve \ufb01ne \u00bd \u2160 \uff21",
    "\u6f22\u5b57\u3068\u304b\u306a \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u0645\u06cc\u200c\u062e\u0648",
    "\U0001f600\U0001f44d\U0001f3fd \u2013 \u201cquoted\u201d \u2026",
)
NUM_TOKENS = 1000  # of the table, whose texts are compared
# Names of ids that a model keeps free, and that another one of its family may have given a token
FREE = re.compile(r"[<\[].*(reserved|unused|placeholder|dummy|extra_|control_|special_\d)", re.I)


def of_tokenizers(tokenizer: Any, other: Any) -> str:
    """How another tokenizer differs from the first: in tokens, ids of texts, or what is ahead."""
    differences = (of_tables, of_texts, of_leading)
    return next(filter(None, (of(tokenizer, other) for of in differences)), "")


def of_leading(tokenizer: Any, other: Any) -> str:
    """How the tokens in front of every text differ, as a bos."""
    opening, others = (t.decode(leading_ids(t)) or "no token" for t in (tokenizer, other))
    return f"it puts {others} in front of a text, not {opening}" if opening != others else ""


def of_tables(tokenizer: Any, other: Any) -> str:
    """A token with two ids, an id with two tokens, or a token that only one has.

    Either may lack tokens that were added to the other, as a base lacks those of chats. Pad tokens
    are not compared: no model reads them.
    """
    both = tokenizer, other
    unread = {t.pad_token for t in both} - {t.eos_token for t in both}
    table, others = ({k: i for k, i in t.get_vocab().items() if k not in unread} for t in both)
    moved = [token for token, i in table.items() if others.get(token, i) != i]
    if moved:
        token = min(moved, key=table.__getitem__)
        return (
            f"the same ids are other tokens, as {token!r}, {others[token]} and not {table[token]}"
        )
    mine = {i: token for token, i in table.items() if token not in others}
    theirs = {i: token for token, i in others.items() if token not in table}
    for i in sorted(mine.keys() & theirs.keys()):
        if not (FREE.match(mine[i]) or FREE.match(theirs[i])):
            return f"the same ids are other tokens, as {i}, {theirs[i]!r} in place of {mine[i]!r}"
    added = tokenizer.get_added_vocab() | other.get_added_vocab()
    for i, token in sorted([*mine.items(), *theirs.items()]):
        if token not in added and not (i in mine and i in theirs) and not FREE.match(token):
            return f"only one of them has the token {token!r}"
    return ""


def of_texts(tokenizer: Any, other: Any) -> str:
    """A text of which they make other ids, without what is put in front of it."""
    both = tokenizer.get_vocab().keys() & other.get_vocab().keys()
    ids = sorted(i for token, i in tokenizer.get_vocab().items() if token in both)
    tokens = map(tokenizer.decode, ids[:: max(1, len(ids) // NUM_TOKENS)])
    return _of_text((*TEXTS, *tokens), tokenizer, other)


def of_words(tokenizer: Any, other: Any) -> str:
    """A word that was added to the other alone, and so is one of its tokens in any text.

    Special tokens are in no text; models that read the first one's ids do without both.
    """
    table, added = tokenizer.get_vocab(), other.added_tokens_decoder.values()
    words = (token.content for token in added if not token.special)
    word = next((word for word in words if word not in table), "")
    return f"only one of them has the token {word!r}" if word else ""


def of_marks(tokenizer: Any, other: Any) -> str:
    """A text around a special token, as a conversation has it, of which they make other ids."""
    tokens = tokenizer.get_added_vocab().keys() & other.get_added_vocab().keys()
    return _of_text([f"a {token} b\n{token}c" for token in sorted(tokens)], tokenizer, other)


def _of_text(texts: Iterable[str], tokenizer: Any, other: Any) -> str:
    """The first of the texts of which they make other ids."""
    texts = list(texts)
    pairs = zip(texts, _ids(texts, tokenizer), _ids(texts, other), strict=True)
    text = next((text for text, ids, others in pairs if ids != others), None)
    return "" if text is None else f"the same text has other ids, as {text[:60]!r}"


def _ids(texts: Sequence[str], tokenizer: Any) -> list[list[int] | None]:
    """Ids of texts; None where the tokenizer refuses one, as a table of words without unknown."""
    try:
        return [*encode(texts, tokenizer)]
    except Exception:  # the tokenizers library raises no subclass of it
        return [None] if len(texts) == 1 else [_ids([text], tokenizer)[0] for text in texts]


# ---- chat templates ------------------------------------------------------------------------------


QUESTION = "A first question?"


class ChatDifference(NamedTuple):
    """How another tokenizer reads conversations."""

    kind: str  # what differs: `chat template`, or `tokenizer` where the text is the same
    clause: str
    is_opening: bool  # no more than the opening, as a default system turn, or how marks are read


def of_conversations(
    examples: Iterable[Example], tokenizer: Any, other: Any
) -> ChatDifference | None:
    """The largest difference between conversations by two tokenizers, None where there is none.

    A base without a template reads what the first one writes.
    """
    difference = None
    if other.chat_template not in (None, tokenizer.chat_template):
        difference = _of_templates(examples, tokenizer, other)
    marks = of_marks(tokenizer, other)
    return difference or (ChatDifference("tokenizer", marks, is_opening=True) if marks else None)


def _of_templates(examples: Iterable[Example], tokenizer: Any, other: Any) -> ChatDifference | None:
    """The largest difference between what two templates write."""
    opening: ChatDifference | None = None
    for example in one_of_each_form(examples):
        difference = _of_conversation(example, tokenizer, other)
        if difference and not difference.is_opening:
            return difference
        opening = opening or difference
    return opening


def _of_conversation(example: Example, tokenizer: Any, other: Any) -> ChatDifference | None:
    """The difference between the texts of a conversation, to the end of an answer's turn."""
    where = f"in row {example.row + 1}"
    text = written(example, tokenizer)
    try:
        others = written(example, other)
    except UserError as error:
        return ChatDifference(
            "chat template", f"{where}: {str(error).rstrip('.')}", is_opening=False
        )
    if text == others:
        return None
    start = len(commonprefix([text, others]))
    clause = f"it writes {others[start : start + 40]!r}, not {text[start : start + 40]!r}, {where}"
    asked = {**example.messages[0], "content": QUESTION}  # words that no opening has
    marked = replace(example, messages=[asked, *example.messages[1:]])
    opening, other_opening = (
        written(marked, each).partition(QUESTION)[0] for each in (tokenizer, other)
    )
    is_opening = text[len(opening) :] == others[len(other_opening) :] != ""
    return ChatDifference("chat template", clause, is_opening)


def written(example: Example, tokenizer: Any) -> str:
    """The text of a conversation by a tokenizer's template, and behind it the end of an answer."""
    (row,) = render(as_raw(example), "prompts", tokenizer)
    return row.prompt + TurnEnd(example.messages, tokenizer).text
