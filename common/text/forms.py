"""The forms in which a row may give its prompt and its completions, brought to one.

TRL's rows have the prompt in a column, or in front of both completions of a pair, or in the
messages of a conversation, or in two of these places. What comes out has it in `prompt` alone.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from common.text.chat import is_messages, split_turns

Row = dict[str, Any]


def with_completion(row: Row, columns: Sequence[str]) -> Row:
    """A row whose column `messages` is prompt and completion in one, with it as `completion`.

    That is TRL's conversational language modelling. What is no list of messages stays, and is
    refused by that name.
    """
    if columns == ("completion",) and "completion" not in row and is_messages(row.get("messages")):
        return {**row, "completion": row["messages"]}
    return row


def without_repeated_prompts(
    rows: Sequence[Row], columns: Sequence[str], source: str, tell: Callable[[str], None]
) -> list[Row]:
    """Rows whose completions repeat the prompt, without it in the completions; tells how many.

    TRL's rows with an implicit prompt have it in front of every completion; some data sets give it
    in a column beside (UltraFeedback as text, the completions as messages), and would be trained
    with the prompt twice. Texts are cut only if all rows are so: a short prompt may by chance be
    how its completions begin.
    """
    repeats = [bool(columns) and _repeats_prompt(row, columns) for row in rows]
    if not any(repeats):
        return list(rows)
    is_layout = all(repeats)
    result, num_cut = [], 0
    for row, repeated in zip(rows, repeats, strict=True):
        is_cut = repeated and (is_layout or is_messages(row[columns[0]]))
        num_cut += is_cut
        result.append(_without_prompt(row, columns) if is_cut else row)
    if num_cut:
        tell(
            f"{source}: {' and '.join(columns)} repeat the prompt in {num_cut} of {len(rows)} "
            "rows, which is cut from them"
        )
    if num_cut < sum(repeats):
        tell(
            f"warning: {source}: {' and '.join(columns)} begin with the text of the prompt in "
            f"{sum(repeats)} of {len(rows)} rows, which are taken as they are"
        )
    return result


def _repeats_prompt(row: Row, columns: Sequence[str]) -> bool:
    """Whether all completions of a row begin with its prompt, or are messages that hold it."""
    prompt: Any = row.get("prompt")
    completions: list[Any] = [row.get(column) for column in columns]
    if isinstance(prompt, str) and all(isinstance(value, str) for value in completions):
        return prompt.strip() != "" and all(value.startswith(prompt) for value in completions)
    if not all(map(is_messages, completions)):
        return False
    if is_messages(prompt):
        return all(value[: len(prompt)] == prompt for value in completions)
    earlier = [[message["content"].strip() for message in value[:-1]] for value in completions]
    return isinstance(prompt, str) and all(prompt.strip() in texts for texts in earlier)


def _without_prompt(row: Row, columns: Sequence[str]) -> Row:
    """A row that repeats its prompt, without the repetition."""
    prompt = row["prompt"]
    if isinstance(prompt, str) and is_messages(row[columns[0]]):
        return {name: value for name, value in row.items() if name != "prompt"}
    return {**row, **{column: row[column][len(prompt) :] for column in columns}}


def with_one_answer(row: Row, columns: Sequence[str]) -> Row:
    """A row of messages with the last one in each completion and those before it in `prompt`."""
    values = [row.get(column) for column in columns]
    values += [row["prompt"]] if "prompt" in row else []
    return split_turns(row, columns) if columns and all(map(is_messages, values)) else row


def with_explicit_prompt(row: Row) -> Row:
    """A pair with a `prompt` column: if it has none, the prefix that both texts share.

    The prefix ends at a word boundary, and a single space there goes to the completions, as in the
    layout of `trl-lib/tldr`; other white space stays with the prompt.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if "prompt" in row or not isinstance(chosen, str) or not isinstance(rejected, str):
        return row
    shared = os.path.commonprefix([chosen, rejected])
    if not (chosen[len(shared) :][:1].isspace() and rejected[len(shared) :][:1].isspace()):
        shared = re.sub(r"\S*\Z", "", shared)
    if re.search(r"\S \Z", shared):
        shared = shared[:-1]
    texts = {"chosen": chosen[len(shared) :], "rejected": rejected[len(shared) :]}
    return {**row, "prompt": shared, **texts}
