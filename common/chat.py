"""Rows of messages as rows of text, by the chat template of the tokenizer."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from common.config import UserError, gist


class Conversation(str):
    """A prompt rendered from messages: used whole or not at all, since no part may be cut."""


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, each with the texts `role` and `content`."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) for message in value)
        and all(isinstance(m.get(key), str) for m in value for key in ("role", "content"))
    )


def split_shared_messages(row: dict[str, Any]) -> dict[str, Any]:
    """A pair of whole conversations with the messages that both begin with as its `prompt`.

    Raises:
        UserError: there are none.
    """
    both = zip(row["chosen"][:-1], row["rejected"][:-1], strict=False)  # the last ones answer
    prompt = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
    if not prompt:
        raise UserError(
            "the conversations of a pair begin differently; give their shared messages as `prompt`."
        )
    rest = {name: row[name][len(prompt) :] for name in ("chosen", "rejected")}
    return {**row, "prompt": prompt, **rest}


def render(row: dict[str, Any], columns: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """The row with text in `prompt` and in its completion columns; unchanged if they hold text.

    The prompt ends where the assistant's turn begins, and a completion is what the template puts
    behind it when that turn is given; joined they are the conversation as the template writes it.

    Raises:
        UserError: a completion is more than one answer; the tokenizer has no chat template, or it
            writes the beginning of a conversation differently once an answer follows.
    """
    if isinstance(row["prompt"], str):
        return row

    def text_of(messages: list[Any], **options: Any) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # templates are programs that come with a model
            raise UserError(
                f"rows hold messages and the tokenizer cannot render them: {gist(error)}; "
                "use a model with a chat template or rows of text."
            ) from None

    prompt = text_of(row["prompt"], add_generation_prompt=True)
    texts: dict[str, str] = {"prompt": Conversation(prompt)}
    for column in columns:
        if [message["role"] for message in row[column]] != ["assistant"]:
            raise UserError(
                f"a {column!r} holds {len(row[column])} messages; it must be one, of the assistant."
            )
        whole = text_of([*row["prompt"], *row[column]])
        if not whole.startswith(prompt):
            raise UserError(
                "the chat template writes a prompt differently once an answer follows; render the "
                "rows to text yourself."
            )
        texts[column] = whole[len(prompt) :]
    return {**row, **texts}
