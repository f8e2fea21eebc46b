"""Rows of messages as rows of text, by the chat template of the tokenizer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from common.errors import UserError, gist
from common.text.truncate import encode


class Conversation(str):
    """A prompt rendered from messages: used whole or not at all, since no part may be cut."""

    messages: Sequence[dict[str, Any]] = ()


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, each with the texts `role` and `content`."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) for message in value)
        and all(isinstance(m.get(key), str) for m in value for key in ("role", "content"))
    )


def render(row: dict[str, Any], columns: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """The row with text in `prompt` and in its completion columns; unchanged if they hold text.

    The prompt ends where the assistant's turn begins, and a completion is what the template puts
    behind it when that turn is given; joined they are the conversation as the template writes it.
    A prompt that ends in a message of the assistant is the beginning of the answer: the completion
    goes on with it.

    Raises:
        UserError: the tokenizer has no chat template, or it writes the beginning of a conversation
            differently once an answer follows.
    """
    if isinstance(row["prompt"], str):
        return row
    text_of = partial(rendered, tokenizer)
    *before, last = row["prompt"]
    is_begun = last["role"] == "assistant"
    turn = "continue_final_message" if is_begun else "add_generation_prompt"
    prompt = Conversation(text_of(row["prompt"], **{turn: True}))
    prompt.messages = row["prompt"]
    texts: dict[str, str] = {"prompt": prompt}
    for column in columns:
        (answer,) = row[column]
        if is_begun:
            whole = text_of([*before, {**answer, "content": last["content"] + answer["content"]}])
        else:
            whole = text_of([*row["prompt"], answer])
        if not whole.startswith(prompt):
            raise UserError(
                "the chat template writes a prompt differently once an answer follows; render the "
                "rows to text yourself."
            )
        texts[column] = whole[len(prompt) :]
    return {**row, **texts}


def rendered(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """What the tokenizer's chat template makes of messages; a UserError if it cannot."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # templates are programs that come with a model
        raise UserError(
            f"rows hold messages and the tokenizer cannot render them: {gist(error)}; "
            "use a model with a chat template or rows of text."
        ) from None


class TurnEnd:
    """What a chat template writes behind an answer: its text and ids.

    At its last token the reward of a conversation is trained and read, as in TRL: ChatML writes a
    line break behind its `<|im_end|>`. A policy's turn ends at the stop token, its last action.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], tokenizer: Any) -> None:
        """Find the end of the turn that answers the messages."""
        answer = {"role": "assistant", "content": "An answer."}  # no text of a template
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages  # it is begun
        self.text = rendered(tokenizer, [*asked, answer]).rpartition(answer["content"])[2]
        self.ids = encode([self.text], tokenizer)[0]
        self.tokenizer = tokenizer

    def closed(self, ids: Sequence[int], has_stop: bool) -> list[int]:
        """The completion with the whole end of its turn, once, also if it did not stop.

        A reward means something at that token only; so TRL, too, closes what broke off, and whether
        it is to be paid for is left to `missing_eos_penalty`.
        """
        whole = list(ids)
        written = whole[:-1] if has_stop else whole  # the stop token may be none of the template's
        for begun in (whole, written):
            for length in range(len(self.ids), 0, -1):
                if begun[-length:] == self.ids[:length]:
                    return [*begun, *self.ids[length:]]
        text = self.tokenizer.decode(written, clean_up_tokenization_spaces=False)
        return written if text.endswith(self.text) else [*written, *self.ids]


def as_answers(
    texts: Sequence[str], prompts: Sequence[Sequence[dict[str, Any]]], tokenizer: Any
) -> list[Any]:
    """Completions as reward functions get them: texts, or messages where the prompt is such.

    What the template writes behind an answer is no part of it, also where a policy wrote it since
    its stop token is another.

    Args:
        texts: B completions without their stop token.
        prompts: B lists of messages, empty for a row of text.
        tokenizer: Of the policy.
    """
    conversation = next((messages for messages in prompts if messages), None)
    end = TurnEnd(conversation, tokenizer).text if conversation else ""
    return [
        [{"role": "assistant", "content": text.removesuffix(end)}] if messages else text
        for text, messages in zip(texts, prompts, strict=True)
    ]
