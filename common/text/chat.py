"""Rows of messages as rows of text, by the chat template of the tokenizer."""

import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from common.errors import UserError, gist
from common.text.truncate import encode

GENERATION = re.compile(r"\{%-?\s*generation\b")  # with it a template marks what is trained
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # which it gets beside messages, as in TRL
WRITTEN_ANEW = (
    "the chat template writes {} differently once {} follows; render the rows to text yourself."
)


class Conversation(str):
    """A prompt rendered from messages: used whole or not at all, since no part may be cut."""

    messages: Sequence[dict[str, Any]] = ()


class Turns(str):
    """A completion of several messages, of which the turns of the assistant are trained.

    Its text is that of `parts`: by turns trained and only read, from the first answer to the last.
    """

    parts: Sequence[str] = ()


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
    )


def is_call(message: dict[str, Any]) -> bool:
    """Whether a message calls tools and says nothing."""
    return message.get("content") is None and bool(message.get("tool_calls"))


def content(message: dict[str, Any]) -> str:
    """What a message says; nothing where it only calls tools."""
    return message.get("content") or ""


def render(row: dict[str, Any], columns: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """The row with text in `prompt` and in its completion columns; unchanged if they hold text.

    The prompt ends where the assistant's turn begins, and a completion is what the template puts
    behind it when that turn is given; joined they are the conversation as the template writes it.
    A prompt that ends in a message of the assistant is the beginning of the answer: the completion
    goes on with it. A completion of several messages becomes `Turns`; what follows the last answer
    is left out. The template gets the row's `TEMPLATE_COLUMNS`.

    Raises:
        UserError: the tokenizer has no chat template, or it writes the beginning of a conversation
            differently once an answer follows, or `tools` is no JSON.
    """
    if isinstance(row["prompt"], str):
        return row
    options = _template_options(row)
    text_of = partial(rendered, tokenizer, options=options)
    asked = [_without_null(message) for message in row["prompt"]]
    is_begun = asked[-1]["role"] == "assistant"
    turn = "continue_final_message" if is_begun else "add_generation_prompt"
    prompt = Conversation(text_of(asked, options=options | {turn: True}))
    prompt.messages = asked
    texts: dict[str, str] = {"prompt": prompt}
    for column in columns:
        answer, *others = [_without_null(message) for message in row[column]]
        while others and others[-1]["role"] != "assistant":
            others.pop()
        before = asked
        if is_begun:
            *before, begun = asked
            answer = {**answer, "content": begun["content"] + answer["content"]}
        messages = [*before, answer, *others]
        whole = text_of(messages)
        if not whole.startswith(prompt):
            raise UserError(WRITTEN_ANEW.format("a prompt", "an answer"))
        texts[column] = whole[len(prompt) :]
        if others:
            ends = _turn_ends(whole, len(prompt), messages, len(before), tokenizer, options)
            texts[column] = turns = Turns(whole[ends[0] : ends[-1]])
            turns.parts = [whole[a:b] for a, b in pairwise(ends)]
    return {**row, **texts}


def _turn_ends(
    whole: str,
    start: int,
    messages: list[dict[str, Any]],
    first: int,
    tokenizer: Any,
    options: dict[str, Any],
) -> list[int]:
    """Where in the text of messages each turn of the assistant begins and ends.

    The first one is message `first`, of which `start` is the place. A template that marks what is
    trained (`{% generation %}`) is believed. Else a turn begins where the template would let the
    assistant begin, and ends with the text of the messages up to it, or if that is written anew
    once others follow (Qwen3's thoughts), with what the template writes behind an answer.
    """
    template = tokenizer.get_chat_template(tools=options["tools"])
    if GENERATION.search(template):
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {"chat_template": template, **tokenizer.special_tokens_map, **options}
        marks = render_jinja_template([messages], return_assistant_tokens_mask=True, **given)[1][0]
        places = [place for mark in marks for place in mark if mark[1] > start]
        if not places:
            raise UserError("the chat template marks no answer of a row by {% generation %}.")
        # An answer that is empty, or a call that the template leaves unmarked, is only read.
        return [start, *places[1:]] if places[0] <= start else [start, start, *places]
    text_of = partial(rendered, tokenizer, options=options)
    ends: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= first:
            begun = (
                text_of(messages[:i], add_generation_prompt=True) if i > first else whole[:start]
            )
            ended = text_of(messages[: i + 1])
            end = len(ended)
            if not whole.startswith(ended):
                close = TurnEnd(messages[:i], tokenizer).text
                end = whole.find(close, len(begun)) + len(close) if close in whole else 0
            if not whole.startswith(begun) or end <= len(begun):
                raise UserError(WRITTEN_ANEW.format("an answer", "another message"))
            ends += [len(begun), end]
    return ends


def _template_options(row: dict[str, Any]) -> dict[str, Any]:
    """What a row gives its template beside messages: `tools`, JSON schemas, may be text."""
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError as error:
        raise UserError(f"column 'tools' holds text that is no JSON: {gist(error)}.") from None
    kwargs = row.get("chat_template_kwargs") or {}
    return {"tools": _without_null(tools) or None, **_without_null(kwargs)}


def _without_null(value: Any) -> Any:
    """JSON without the keys that Parquet adds to a row because others have them; as in TRL."""
    if isinstance(value, list):
        return [_without_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_null(one) for key, one in value.items() if one is not None}
    return {**kept, "content": ""} if is_call(kept) else kept


def rendered(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any] | None = None,
    **turn: bool,
) -> str:
    """What the tokenizer's chat template makes of messages; a UserError if it cannot."""
    given = (options or {}) | turn
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **given))
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
