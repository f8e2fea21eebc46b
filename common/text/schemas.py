"""Schemas of rows: TRL's are brought to one, others are refused with what to do instead.

TRL's rows have the prompt in a column, or in front of both completions of a pair, or in the
messages of a conversation, or in two of these places. Afterwards it is in `prompt` alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from common import distributed
from common.errors import UserError
from common.text.shared_prompt import shared_prompt

RawRow = dict[str, Any]
"""A row as its file has it: cells by column, text or messages."""

COMPLETION_COLUMNS: dict[str, tuple[str, ...]] = {
    "sft": ("completion",),
    "preference": ("chosen", "rejected"),
    "prompts": (),
}
"""By the kind of rows: columns next to `prompt`, in the order of the K completions."""

# Columns that may hold the question of a pair of texts, which are then refused without a `prompt`
QUESTIONS = ("question", "instruction", "input", "query", "messages", "conversations")
PAIR = ("chosen", "rejected")
CHATS = ("messages", "prompt", "completion", *PAIR)  # columns that may hold messages
LIST = "list of messages, each with the texts 'role' and 'content'"
PAGE = "docs/data.md has the rows that each stage reads, and a short `map` for others"


@dataclass
class Row:
    """A prompt with its K completions as text; of a conversation one row per answer."""

    prompt: str  # of a conversation, all that its template writes before the answer
    completions: list[str]  # one for each of its kind's `COMPLETION_COLUMNS`
    columns: dict[str, Any] = field(default_factory=dict)  # the others, for reward functions
    number: int = 0  # index into the rows that were read; answers of one conversation share it
    messages: list[dict[str, Any]] = field(default_factory=list)  # the prompt; empty for text
    is_partial: bool = False  # the template leaves out words or thoughts of an answer

    @classmethod
    def of_text(cls, raw: RawRow, kind: str, number: int = 0) -> "Row":
        """A row whose cells are text."""
        names = COMPLETION_COLUMNS[kind]
        others = {name: cell for name, cell in raw.items() if name not in ("prompt", *names)}
        return cls(raw["prompt"], [raw[name] for name in names], others, number)


def standardise(rows: list[RawRow], kind: str, label: str) -> list[RawRow]:
    """Bring rows to one schema: a prompt, and completions that do not repeat it.

    A message whose content is a list of text parts gets their text. A row of texts with a `prompt`
    stays as it is, unless the completions of all rows repeat it. A column `messages` is prompt and
    completion in one (TRL's conversational language modelling). A row with a blank cell becomes one
    of texts, one of them empty, which `tokenise` marks and `load_examples` drops. Messages call the
    split `label`. A UserError names the row, counted from 1, and the column that has another
    schema.
    """
    columns = COMPLETION_COLUMNS[kind]
    rows = [_from_messages(_with_joined_parts(row), columns) for row in rows]
    rows = _cut_repeated_prompts(rows, columns or PAIR, label)
    rows = [_with_shared_prompt(row, columns) for row in rows]
    if num_unread := sum(map(_has_unread_system, rows)):
        distributed.print_rank0(
            f"warning: {label}: the column 'system' of {num_unread} rows is not read; put its text "
            "first in the messages (docs/data.md)"
        )
    rows = [_empty_blank(row, (*columns, "prompt")) for row in rows]
    for number, row in enumerate(rows, start=1):
        if fault := _fault(row, kind):
            raise UserError(f"{label}, row {number}: {fault}.")
    return rows


def _has_unread_system(row: RawRow) -> bool:
    """Whether a prompt of messages has its system message in a column, which is not read."""
    prompt: Any = row.get("prompt")
    if not is_messages(prompt) or prompt[0]["role"] in ("system", "developer"):
        return False
    return not is_blank(row.get("system"))


def _with_joined_parts(row: RawRow) -> RawRow:
    """A row in which a content that is a list of text parts is their text."""
    is_chat = {name: name in CHATS and isinstance(cell, list) for name, cell in row.items()}
    return {k: [*map(_joined, cell)] if is_chat[k] else cell for k, cell in row.items()}


def _joined(turn: Any) -> Any:
    """A message with the text of its parts; as it is if it has no parts, or others than text."""
    parts: Any = turn.get("content") if isinstance(turn, dict) else None
    is_joined = isinstance(parts, list) and not _other_parts(parts)
    return {**turn, "content": "".join(part["text"] for part in parts)} if is_joined else turn


def _other_parts(parts: list[Any]) -> list[str]:
    """The types of a content's parts that are no text."""
    others = [part for part in parts if not _is_text_part(part)]
    return [str(part.get("type")) if isinstance(part, dict) else repr(part) for part in others]


def _is_text_part(part: Any) -> bool:
    """Whether a part of a content is a text; Parquet gives it null keys that others have."""
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _from_messages(row: RawRow, columns: Sequence[str]) -> RawRow:
    """Move `messages`, prompt and completion in one, to the first column that a stage reads."""
    turns: Any = row.get("messages")
    target = columns[0] if columns else "prompt"
    if len(columns) > 1 or target in row or "messages" not in row:
        return row
    if not columns and all(is_messages(row.get(name)) for name in PAIR):
        return row
    if not (is_messages(turns) or is_blank(turns)):
        return row
    if not columns and is_messages(turns) and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return {**row, target: turns}


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, each with the texts `role` and `content`.

    One that calls tools may have no content.
    """
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) for message in value)
        and all(isinstance(m.get("role"), str) for m in value)
        and all(isinstance(m.get("content"), str) or is_call(m) for m in value)
        and all(isinstance(m.get("tool_calls") or [], list) for m in value)
    )


def is_call(message: dict[str, Any]) -> bool:
    """Whether a message calls tools and has no text."""
    return not message.get("content") and bool(message.get("tool_calls"))


def content(message: dict[str, Any]) -> str:
    """The text of a message; empty if it only calls tools."""
    return message.get("content") or ""


def is_blank(cell: Any) -> bool:
    """Whether a cell is null, white space, no messages or empty ones, or has null for content."""
    if isinstance(cell, str):
        return not cell.strip()
    if is_messages(cell):
        return not any(content(turn).strip() or is_call(turn) for turn in cell)
    turns = cell if isinstance(cell, list) else []
    nulls = (isinstance(t, dict) and t.get("content", "") is None for t in turns)
    return cell is None or cell == [] or any(nulls)


def _blank_column(row: RawRow, columns: Sequence[str]) -> str:
    """The first blank column of a row; empty if none is."""
    return next((name for name in columns if name in row and is_blank(row[name])), "")


def _empty_blank(row: RawRow, columns: Sequence[str]) -> RawRow:
    """A row with a blank cell as one of texts, that cell empty; another one as it is."""
    name = _blank_column(row, columns)
    return {**row, **dict.fromkeys(columns, "-"), name: ""} if name else row


def _cut_repeated_prompts(rows: list[RawRow], columns: Sequence[str], label: str) -> list[RawRow]:
    """Cut the prompt from completions that repeat it, and print in how many rows.

    Rows of TRL with an implicit prompt may have a `prompt` column too; in UltraFeedback it is text
    and the completions are messages. Such rows would be trained with the prompt twice. Texts are
    cut only if all rows are so: a completion may begin like its short prompt by chance.
    """
    cut = [_cut_repeated_prompt(row, columns) for row in rows]
    pairs = [*zip(rows, cut, strict=True)]
    all_repeat = all(new or _blank_column(row, ("prompt", *columns)) for row, new in pairs)
    is_cut = [bool(new) and (all_repeat or is_messages(row[columns[0]])) for row, new in pairs]
    if num_repeating := len(rows) - cut.count(None):
        distributed.print_rank0(
            f"{label}: {' and '.join(columns)} repeat the prompt in {num_repeating} of {len(rows)} "
            f"rows; it is cut from {sum(is_cut)}"
        )
    return [new if new and c else row for (row, new), c in zip(pairs, is_cut, strict=True)]


def _cut_repeated_prompt(row: RawRow, columns: Sequence[str]) -> RawRow | None:
    """Cut the prompt from the completions of a row; None unless all of them repeat it.

    Messages that have the prompt's text in an earlier turn keep it, and the column `prompt` goes.
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


def _with_shared_prompt(row: RawRow, columns: Sequence[str]) -> RawRow:
    """Move what the completions share to the end of the prompt, or to a new prompt.

    The completion of SFT is compared with a column `rejected`, and prompts are those of pairs.

    - One completion of messages: all before the first answer, or all if there is none. A
      conversation that opens with a turn of the assistant has it in the prompt.
    - A pair of messages: the turns that both share before the last message, which is the answer.
    - A pair of texts without a `prompt` column: as `shared_prompt`.
    """
    first = columns[0] if columns else "chosen"
    is_pair = "rejected" in row and ("messages" not in row or row.get(first) is not row["messages"])
    names = (first, "rejected") if is_pair else columns
    if not names:
        return row
    values: list[Any] = [row.get(name) for name in names]
    prompt: Any = row.get("prompt", [])
    is_text_pair = len(values) == 2 and all(isinstance(value, str) for value in values)
    if all(map(is_messages, values)) and (is_messages(prompt) or "prompt" not in row):
        if len(values) == 1:  # every answer is trained
            num_opening = 0 if prompt else 1
            asked = takewhile(lambda turn: turn["role"] != "assistant", values[0][num_opening:])
            shared: Any = [*values[0][:num_opening], *asked]
        else:
            earlier = zip(*(value[:-1] for value in values), strict=False)
            alike = takewhile(lambda turn: turn.count(turn[0]) == len(turn), earlier)
            shared = [turn[0] for turn in alike]
        prompt = [*prompt, *shared]
    elif "prompt" not in row and _blank_column(row, names):
        return {**row, "prompt": None}
    elif is_text_pair and "prompt" not in row and all(is_blank(row.get(q)) for q in QUESTIONS):
        if values[0] == values[1]:  # dropped: as an identical pair, or without a prompt
            return {**row, "prompt": values[0] if len(columns) == 2 else None}
        prompt = shared = shared_prompt(*values)
    else:
        return row
    answers = {name: row[name][len(shared) :] for name in columns}
    return {**row, "prompt": prompt, **answers}


def as_turns(row: RawRow, kind: str) -> RawRow:
    """A row of texts as a conversation: the prompt is the user's turn, the others are answers.

    White space around a text, which separates it from the others, is cut. A row with a blank cell,
    which is dropped, stays as it is.
    """
    if not isinstance(row["prompt"], str) or _blank_column(
        row, (*COMPLETION_COLUMNS[kind], "prompt")
    ):
        return row
    roles = {"prompt": "user", **dict.fromkeys(("completion", *PAIR), "assistant")}
    turns = {
        name: [{"role": role, "content": row[name].strip()}]
        for name, role in roles.items()
        if isinstance(row.get(name), str) and row[name].strip()
    }
    return row | turns


def _fault(row: RawRow, kind: str) -> str:
    """The reason that a row does not fit the schema of its kind, empty if it does."""
    columns = (*COMPLETION_COLUMNS[kind], "prompt")
    if fault := _fault_of_parts(row, columns):
        return fault
    if missing := [column for column in columns if column not in row]:
        there = ", ".join(map(repr, row)) or "none"
        is_pair = missing[0] == "completion" and "chosen" in row
        other = "chosen takes those" if is_pair else "NAME takes another one"
        advice = f"--column_map {missing[0]}={other}; {PAGE}"
        return f"column {missing[0]!r} is missing; the columns are {there}: {advice}"
    for column in columns:
        value = row[column]
        if not isinstance(value, str) and not is_messages(value):
            kind_of_value = type(value).__name__
            return f"column {column!r} holds {kind_of_value}, it must be text or a {LIST}"
        if is_messages(value) != is_messages(row["prompt"]):
            return f"{column!r} and 'prompt' must both be text or both be messages"
        try:
            (value if isinstance(value, str) else "".join(map(content, value))).encode()
        except UnicodeEncodeError:  # JSON may escape half of a pair, which no tokenizer takes
            return f"column {column!r} holds half of a surrogate pair, which is no character"
        if column != "prompt" and is_messages(value):
            roles = ", ".join(message["role"] for message in value)
            if roles != "assistant" and not (kind == "sft" and roles.startswith("assistant,")):
                return (
                    f"column {column!r} has messages of {roles} behind those that all completions "
                    "share; it must be one, of the assistant"
                )
    is_answered = is_messages(row["prompt"]) and row["prompt"][-1]["role"] == "assistant"
    kwargs = row.get("chat_template_kwargs") or {}
    if kind == "prompts" and is_answered and not kwargs.get("continue_final_message"):
        return (
            "column 'prompt' ends with an answer of the assistant; leave it out, or have it "
            "continued by 'continue_final_message': true in the column 'chat_template_kwargs'"
        )
    return ""


def _fault_of_parts(row: RawRow, columns: Sequence[str]) -> str:
    """The reason that a chat which a stage reads has parts that are no text; empty without."""
    is_from_messages = any(column not in row for column in columns)
    for column in (*columns, *["messages"] * is_from_messages):
        cell = row.get(column)
        turns = [turn for turn in cell if isinstance(turn, dict)] if isinstance(cell, list) else []
        contents = [turn["content"] for turn in turns if isinstance(turn.get("content"), list)]
        if others := [other for parts in contents for other in _other_parts(parts)]:
            return (
                f"column {column!r} has a message with a part of type {others[0]!r}, and only "
                f"parts of type 'text' are read; {PAGE}"
            )
    return ""
