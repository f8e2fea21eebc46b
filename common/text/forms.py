"""The forms in which a row may give its prompt and its completions, brought to one.

TRL's rows have the prompt in a column, or in front of both completions of a pair, or in the
messages of a conversation, or in two of these places. What comes out has it in `prompt` alone.
"""

import operator
import os
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from common.text.chat import is_messages

Row = dict[str, Any]


def with_own_prompts(
    rows: Sequence[Row], columns: Sequence[str], source: str, tell: Callable[[str], None]
) -> list[Row]:
    """Rows with what all completions share in `prompt` and nowhere else; tells what it cut.

    A column `messages` is prompt and completion in one (TRL's conversational language modelling).
    What does not fit a form stays as it is, and is refused by its own names.

    TRL's rows with an implicit prompt have it in front of every completion; some data sets give it
    in a column beside (UltraFeedback as text, the completions as messages), and would be trained
    with the prompt twice. Texts are cut only if all rows are so: a short prompt may by chance be
    how its completions begin.
    """
    if not columns:
        return list(rows)
    if columns == ("completion",):
        rows = [
            {**row, "completion": row["messages"]}
            if "completion" not in row and is_messages(row.get("messages"))
            else row
            for row in rows
        ]
    cut = [_without_repetition(row, columns) for row in rows]
    num_found = len(rows) - cut.count(None)
    is_layout = num_found == len(rows)
    result = [
        new if new and (is_layout or is_messages(row[columns[0]])) else row
        for row, new in zip(rows, cut, strict=True)
    ]
    num_cut = sum(map(operator.is_not, result, rows))
    names = " and ".join(columns)
    if num_cut:
        many = f"{num_cut} of {len(rows)} rows"
        tell(f"{source}: {names} repeat the prompt in {many}, which is cut from them")
    if num_cut < num_found:
        many = f"{num_found} of {len(rows)} rows"
        begin = f"{names} begin with the text of the prompt in {many}, which are taken as they are"
        tell(f"warning: {source}: {begin}")
    return [_with_shared_prompt(row, columns) for row in result]


def _without_repetition(row: Row, columns: Sequence[str]) -> Row | None:
    """The row without its prompt in the completions; None unless all begin with it, or hold it.

    The latter are messages beside a text; they keep it, and the text goes.
    """
    prompt: Any = row.get("prompt")
    values: list[Any] = [row.get(column) for column in columns]
    is_chat = all(map(is_messages, values))
    if is_chat and isinstance(prompt, str):
        earlier = [[message["content"].strip() for message in value[:-1]] for value in values]
        is_there = all(prompt.strip() in texts for texts in earlier)
        return {k: v for k, v in row.items() if k != "prompt"} if is_there else None
    is_text = isinstance(prompt, str) and all(isinstance(value, str) for value in values)
    if not (is_text and prompt.strip()) and not (is_chat and is_messages(prompt)):
        return None
    if any(value[: len(prompt)] != prompt for value in values):
        return None
    return {**row, **{column: row[column][len(prompt) :] for column in columns}}


def _with_shared_prompt(row: Row, columns: Sequence[str]) -> Row:
    """The row with what its completions share at the end of the prompt, or as the prompt.

    Of messages those before the last one, which answers: so earlier turns, also those of the
    assistant, are read and not trained. Of the texts of a pair without a `prompt` column the
    prefix. It ends at a word boundary, and a single space there goes to the completions, as in the
    layout of `trl-lib/tldr`; other white space stays with the prompt.
    """
    values: list[Any] = [row.get(column) for column in columns]
    prompt: Any = row.get("prompt", [])
    if all(map(is_messages, values)) and (is_messages(prompt) or "prompt" not in row):
        earlier = zip(*(value[:-1] for value in values), strict=False)
        alike = takewhile(lambda turn: turn.count(turn[0]) == len(turn), earlier)
        shared: Any = [turn[0] for turn in alike]
        prompt = [*prompt, *shared]
    elif len(columns) == 2 and "prompt" not in row and all(isinstance(v, str) for v in values):
        shared = os.path.commonprefix(values)
        if not all(value[len(shared) :][:1].isspace() for value in values):
            shared = re.sub(r"\S*\Z", "", shared)
        if re.search(r"\S \Z", shared):
            shared = shared[:-1]
        prompt = shared
    else:
        return row
    rest = {name: value[len(shared) :] for name, value in zip(columns, values, strict=True)}
    return {**row, "prompt": prompt, **rest}
