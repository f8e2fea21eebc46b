"""The forms in which a row may give its prompt and its completions, brought to one.

TRL's rows have the prompt in a column, or in front of both completions of a pair, or in the
messages of a conversation, or in two of these places. What comes out has it in `prompt` alone.
"""

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from common.errors import UserError
from common.text.chat import content, is_call, is_messages

Row = dict[str, Any]

# Columns of schemas that are not TRL's
FOREIGN = {"conversations", "instruction", "text"}
# Columns that may hold the question of a pair
QUESTIONS = ("question", "instruction", "input", "query", "messages", "conversations")


def renamed(
    rows: list[Row], column_map: Mapping[str, str], source: str, *, may_lack: bool
) -> list[Row]:
    """The rows with other names for columns; a UserError for one that is not there, or is taken."""
    if not column_map:
        return rows
    there = dict.fromkeys(name for row in rows for name in row)
    for new, old in column_map.items():
        what = f"--column_map has {new}={old}"
        if old not in there and not may_lack:
            listed = ", ".join(map(repr, there))
            raise UserError(f"{what}; {source} has no column {old!r}, it has: {listed}.")
        if old in there and new in there and new not in column_map.values():
            raise UserError(
                f"{what}, and {source} has a column {new!r}, which that would replace; give it "
                f"another name too, as other_{new}={new}."
            )
    names = {old: new for new, old in column_map.items()}
    return [{names.get(name, name): cell for name, cell in row.items()} for row in rows]


def _from_messages(row: Row, columns: Sequence[str]) -> Row:
    """A row whose messages are prompt and completion in one, in columns; another one as it is."""
    turns: Any = row.get("messages")
    target = columns[0] if columns else "prompt"
    if len(columns) > 1 or target in row or "messages" not in row:
        return row
    if not (is_messages(turns) or is_blank(turns)):
        return row
    if not columns and is_messages(turns) and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return {**row, target: turns}


def way_out(row: Row, kind: str, column: str) -> str:
    """What to do about a column that is not there, a clause: by the schema that a row has."""
    if "labels" in row and "completions" in row:
        return "stepwise supervision has no stage; join the steps to one text"
    if kind == "preference" and row.keys() >= {"completion", "label"}:
        return "unpaired preferences (KTO) have no stage; pair a good and a bad completion"
    if kind == "preference" and isinstance(row.get("chosen"), str) and (name := _question(row)):
        return (
            f"{name!r} is not in the beginning that both texts share; "
            f"--column_map prompt={name} takes it as prompt, other={name} leaves it aside"
        )
    if row.keys() & FOREIGN and not row.keys() & {"prompt", "chosen", "completion"}:
        return "docs/data.md has a short `map` for rows of ShareGPT, Alpaca and plain text"
    if kind == "preference" and row.keys() & {"messages", "completion"}:
        return "train_sft.py takes such rows; a pair is `chosen` and `rejected`"
    if kind == "sft" and row.keys() >= {"chosen", "rejected"}:
        return "train_reward.py and train_dpo.py take pairs; here --column_map completion=chosen"
    if kind == "prompts" and "chosen" in row:
        return "of pairs it is needed in a column of its own"
    if row.keys() == {"prompt"}:
        return "train_grpo.py takes prompts alone"
    return f"--column_map {column}=NAME takes another one"


def _question(row: Row, shared: str = "") -> str:
    """The first column that may hold a pair's question, and whose text is not in what it shares."""
    values = ((name, row.get(name)) for name in QUESTIONS)
    asked = ((n, v.strip() if isinstance(v, str) else None) for n, v in values if not is_blank(v))
    return next((name for name, text in asked if text is None or text not in shared), "")


def is_blank(cell: Any) -> bool:
    """Whether a cell is null, white space, no messages or empty ones, or has null for content."""
    if isinstance(cell, str):
        return not cell.strip()
    if is_messages(cell):
        return not any(content(turn).strip() or is_call(turn) for turn in cell)
    turns = cell if isinstance(cell, list) else []
    nulls = (isinstance(t, dict) and t.get("content", "") is None for t in turns)
    return cell is None or cell == [] or any(nulls)


def _blank_column(row: Row, columns: Sequence[str]) -> str:
    """The first of the columns that a row has and that is blank; empty if none is."""
    return next((name for name in columns if name in row and is_blank(row[name])), "")


def with_own_prompts(
    rows: list[Row], columns: Sequence[str], source: str, tell: Callable[[str], None]
) -> list[Row]:
    """Rows with what all completions share in `prompt` and nowhere else; tells what it changed.

    A column `messages` is prompt and completion in one (TRL's conversational language modelling).
    What does not fit a form stays as it is, and is refused by its own names. A row with a blank
    cell becomes one of texts with an empty one, which is dropped and counted with the others.
    """
    rows = [_from_messages(row, columns) for row in rows]
    lacking = [i for i, row in enumerate(rows) if "prompt" not in row and len(columns) == 2]
    if columns:
        rows = _without_repetitions(rows, columns, source, tell)
        rows = [_with_shared_prompt(row, columns) for row in rows]
    placed = [_with_system(row) for row in rows]
    if num := sum(map(operator.is_not, placed, rows)):
        tell(f"{source}: `system` put first in {num} of {len(rows)} rows")
    rows = placed
    cells = ("prompt", *columns)
    blank = {i: name for i, row in enumerate(rows) if (name := _blank_column(row, cells))}
    unshared = [i for i in lacking if blank.get(i) == "prompt"]
    if num := sum(isinstance(rows[i].get("prompt"), str) and i not in blank for i in lacking):
        tell(f"{source}: prompt taken from what both texts share in {num} of {len(rows)} rows")
    for what, found in (
        ("have no prompt, since their completions share no beginning,", unshared),
        ("have a blank or null cell or no answer", sorted(blank.keys() - set(unshared))),
    ):
        if found:
            where = "" if found is unshared else f", column {blank[found[0]]!r}"
            what = f"{len(found)} of {len(rows)} rows {what} and are dropped"
            tell(f"{source}: {what}, the first is row {found[0] + 1}{where}")
    emptied = {i: {**rows[i], **dict.fromkeys(cells, "-"), name: ""} for i, name in blank.items()}
    return [emptied.get(i, row) for i, row in enumerate(rows)]


def _with_system(row: Row) -> Row:
    """The row with its text `system` as the first message of its prompt, if that has none."""
    system: Any = row.get("system")
    prompt: Any = row.get("prompt")
    is_text = isinstance(system, str) and system.strip()
    if not is_text or not is_messages(prompt) or prompt[0]["role"] in ("system", "developer"):
        return row
    return {**row, "prompt": [{"role": "system", "content": system}, *prompt]}


def _without_repetitions(
    rows: list[Row], columns: Sequence[str], source: str, tell: Callable[[str], None]
) -> list[Row]:
    """Rows without the prompt in front of their completions.

    TRL's rows with an implicit prompt have it there; some data sets give it in a column beside
    (UltraFeedback as text, the completions as messages), and would be trained with the prompt
    twice. Texts are cut only if all rows are so: a short prompt may by chance be how its
    completions begin.
    """
    cut = [_without_repetition(row, columns) for row in rows]
    pairs = list(zip(rows, cut, strict=True))
    is_layout = all(new or _blank_column(row, ("prompt", *columns)) for row, new in pairs)
    result = [
        new if new and (is_layout or is_messages(row[columns[0]])) else row for row, new in pairs
    ]
    num_found, num_cut = len(rows) - cut.count(None), sum(map(operator.is_not, result, rows))
    names, of = " and ".join(columns), f"of {len(rows)} rows, which"
    if num_cut:
        tell(f"{source}: {names} repeat the prompt in {num_cut} {of} is cut from them")
    if num_cut < num_found:
        begin = f"{names} begin with the text of the prompt in {num_found} {of} are taken as"
        tell(f"warning: {source}: {begin} they are")
    return result


def _without_repetition(row: Row, columns: Sequence[str]) -> Row | None:
    """The row without its prompt in the completions; None unless all begin with it, or hold it.

    The latter are messages beside a text; they keep it, and the text goes.
    """
    prompt: Any = row.get("prompt")
    values: list[Any] = [row.get(column) for column in columns]
    is_chat = all(map(is_messages, values))
    if is_chat and isinstance(prompt, str):
        earlier = [[content(message).strip() for message in value[:-1]] for value in values]
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

    Of one completion of messages those before the first answer, all if there is none: a
    conversation may open with a turn of the assistant, which is read. Of a pair those before the
    last message, which answers: so earlier turns are read and not trained. Of the texts of a pair
    without a `prompt` column the prefix. It ends at a word boundary, and a single space there goes
    to the completions, as in the layout of `trl-lib/tldr`; other white space stays with the prompt.
    """
    values: list[Any] = [row.get(column) for column in columns]
    prompt: Any = row.get("prompt", [])
    if all(map(is_messages, values)) and (is_messages(prompt) or "prompt" not in row):
        if len(columns) == 1:  # every answer is trained
            num_opening = 0 if prompt else 1
            asked = takewhile(lambda turn: turn["role"] != "assistant", values[0][num_opening:])
            shared: Any = [*values[0][:num_opening], *asked]
        else:
            earlier = zip(*(value[:-1] for value in values), strict=False)
            alike = takewhile(lambda turn: turn.count(turn[0]) == len(turn), earlier)
            shared = [turn[0] for turn in alike]
        prompt = [*prompt, *shared]
    elif len(columns) == 2 and "prompt" not in row and all(isinstance(v, str) for v in values):
        shared = os.path.commonprefix(values)
        if not all(value[len(shared) :][:1].isspace() for value in values):
            shared = re.sub(r"\S*\Z", "", shared)
        if re.search(r"\S \Z", shared):
            shared = shared[:-1]
        if _question(row, shared):
            return row  # refused as one without a prompt
        prompt = shared
    else:
        return row
    rest = {name: value[len(shared) :] for name, value in zip(columns, values, strict=True)}
    return {**row, "prompt": prompt, **rest}
