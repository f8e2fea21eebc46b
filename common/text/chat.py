"""Conversations as rows of text, by the chat template of the tokenizer."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Any

from common.errors import UserError, gist
from common.text.example import Example, Vocabulary
from common.text.schemas import COMPLETION_COLUMNS, RawRow, Row, content
from common.text.tokenise import encode

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # given to the template, as in TRL
ANSWER = {"role": "assistant", "content": "An answer."}  # to look at what is around it
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # a message's key for them, by family


def render(
    raw: RawRow,  # its cells are messages
    kind: str,  # `sft`, `preference` or `prompts`
    tokenizer: Any,
    number: int = 0,  # of the row in its split
) -> list[Row]:
    """Rows of text: one per answer of a conversation, one of a pair.

    The prompt is the template's text of all messages before the answer, to where the assistant
    begins, as when the model is used. The completion is what the template writes behind it when the
    answer is the last message. A prompt that ends in a message of the assistant is the beginning of
    the answer: the completion goes on with it. No row has an answer of `weight` 0 or `train` false.
    A UserError if the tokenizer has no template, or it writes a prompt differently with an answer,
    or for a column `tools` of text that is no JSON.
    """
    names = COMPLETION_COLUMNS[kind]
    others = {name: cell for name, cell in raw.items() if name not in ("prompt", *names)}
    options = _template_options(raw)
    asked = _without_null(raw["prompt"])
    chats = [_without_null(raw[name]) for name in names]  # K lists of messages
    begun = [asked.pop()] if asked[-1]["role"] == "assistant" else []
    for chat in chats if begun else ():
        chat[0] = {**chat[0], "content": content(begun[0]) + content(chat[0])}
    rows = []
    for i, answers in enumerate(zip(*chats, strict=False) if chats else [()]):
        is_off = any(m.get("weight") == 0 or m.get("train") is False for m in answers)
        if is_off or any(message["role"] != "assistant" for message in answers):
            continue
        before = [*asked, *(chats[0][:i] if chats else ())]
        begun = [] if i else begun
        turn = "continue_final_message" if begun else "add_generation_prompt"
        prompt = rendered(tokenizer, [*before, *begun], options | {turn: True})
        texts = [
            _answer_text(prompt, rendered(tokenizer, [*before, answer], options))
            for answer in answers
        ]
        opening = "".join(map(content, begun))
        is_partial = any(
            _leaves_out(answer, opening + text) for answer, text in zip(answers, texts, strict=True)
        )
        rows.append(Row(prompt, texts, others, number, [*before, *begun], is_partial))
    return rows


def _answer_text(prompt: str, whole: str) -> str:
    """The text of the whole conversation without the prompt; a UserError if it begins otherwise."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    start = len(commonprefix([prompt, whole]))
    raise UserError(
        "the chat template writes a prompt differently once an answer follows, "
        f"{whole[start : start + 40]!r} for {prompt[start : start + 40]!r}; "
        "render the rows to text yourself."
    )


def _leaves_out(answer: dict[str, Any], text: str) -> bool:
    """Whether the text of an answer lacks its words or thoughts; white space aside."""
    passages = [*re.split("</?think>", content(answer)), *map(answer.get, THOUGHTS)]
    written = "".join(text.split())
    texts = {"".join(str(passage).split()) for passage in passages if passage}
    for passage in sorted(texts, key=len, reverse=True):  # a match counts once
        if passage not in written:
            return True
        written = written.replace(passage, " ", 1)
    return False


def _template_options(row: RawRow) -> dict[str, Any]:
    """Arguments of the template from a row: `tools`, JSON schemas or their text, and others."""
    tools: Any = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError as error:
        reason = gist(error)
        raise UserError(
            f"the column 'tools' holds {tools[:60]!r}, which is no JSON: {reason}."
        ) from None
    kwargs = row.get("chat_template_kwargs") or {}
    kwargs = {k: v for k, v in kwargs.items() if k != "continue_final_message"}  # see `schemas`
    return {"tools": _without_null(tools) or None, **_without_null(kwargs)}


def _without_null(value: Any) -> Any:
    """JSON without the null keys that Parquet adds to a row because others have them; as in TRL."""
    if isinstance(value, list):
        return [_without_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_null(one) for key, one in value.items() if one is not None}


def rendered(tokenizer: Any, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> str:
    """Text of messages by the tokenizer's chat template; a UserError if it fails."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # templates are programs that come with a model
        raise UserError(
            f"rows hold messages and the tokenizer cannot render them: {gist(error)}; "
            "use a model with a chat template or rows of text."
        ) from None


def begins_answer(prompt: str, tokenizer: Any) -> bool:
    """Whether a text ends as the chat template does where the answer to a user begins."""
    asked = {"role": "user", "content": "A question."}
    try:
        text = rendered(tokenizer, [asked], {"add_generation_prompt": True})
    except UserError:  # of a template that has no such turn
        return False
    return prompt.endswith(text.rpartition(asked["content"])[2])


class TurnEnd:
    """The end of an assistant's turn in a chat template: its text and ids.

    A reward model is trained and read at its last token, as in TRL: in ChatML the line break behind
    `<|im_end|>`. A policy's turn ends at the stop token, its last action.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], tokenizer: Any) -> None:
        """Find the end of the turn that answers the messages."""
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages  # it is begun
        self.text = rendered(tokenizer, [*asked, ANSWER], {}).rpartition(ANSWER["content"])[2]
        self.ids = encode([self.text], tokenizer)[0]
        self.tokenizer = tokenizer

    def closed(self, ids: Sequence[int], has_stop: bool) -> list[int]:
        """Complete the end of the turn, also of a completion that was truncated, as in TRL.

        A reward has a meaning at that token only; `missing_eos_penalty` is for truncated ones.
        """
        whole = list(ids)
        written = whole[:-1] if has_stop else whole  # the stop token may be none of the template's
        for begun in (whole, written):
            for length in range(len(self.ids), 0, -1):
                if begun[-length:] == self.ids[:length]:
                    return [*begun, *self.ids[length:]]
        text = self.tokenizer.decode(written, clean_up_tokenization_spaces=False)
        return written if text.endswith(self.text) else [*written, *self.ids]


def as_raw(example: Example, **cells: Any) -> RawRow:
    """A conversation as `render` takes it: its messages, what goes to the template, and cells."""
    options = {n: example.columns[n] for n in TEMPLATE_COLUMNS if n in example.columns}
    return {**options, "prompt": example.messages, **cells}


def one_of_each_form(examples: Iterable[Example]) -> list[Example]:
    """The first conversation of each form: of the same roles and keys, and template columns.

    Templates refuse forms, as one with a system turn, hardly ever words.
    """
    first: dict[str, Example] = {}
    for example in examples:
        if example.messages:
            turns = [(turn["role"], *sorted(turn)) for turn in example.messages]
            options = [example.columns.get(name) for name in TEMPLATE_COLUMNS]
            first.setdefault(f"{turns} {options}", example)
    return list(first.values())


def to_end_of_turn(
    examples: Sequence[Example], vocabulary: Vocabulary, limit: int | None
) -> Sequence[Example]:
    """Complete the turn of each conversation for a reward model; rows of text are unchanged.

    A UserError if one is then longer than the model's positions.
    """
    first = next((example for example in examples if example.messages), None)
    if first is None:
        return examples
    end = TurnEnd(first.messages, vocabulary.tokenizer)
    closed = [
        replace(e, completions=[end.closed(c, c[-1] in vocabulary.stop_ids) for c in e.completions])
        if e.messages
        else e
        for e in examples
    ]
    longest = max(len(e.prompt_ids) + len(c) for e in closed if e.messages for c in e.completions)
    if limit is not None and longest > limit:
        raise UserError(
            f"a conversation with the end of its turn is {longest} tokens, and the model has "
            f"{limit} positions; lower --max_completion_length by {longest - limit}."
        )
    return closed


def as_answers(
    texts: Sequence[str],  # B completions without their stop token
    prompts: Sequence[Sequence[dict[str, Any]]],  # B lists of messages, empty for a row of text
    tokenizer: Any,  # of the policy
) -> list[Any]:
    """Completions as arguments of reward functions: texts, or messages where the prompt is such.

    The template's end of a turn is cut, also where a policy with another stop token wrote it.
    """
    conversation = next((messages for messages in prompts if messages), None)
    end = TurnEnd(conversation, tokenizer).text if conversation else ""
    return [
        [{"role": "assistant", "content": text.removesuffix(end)}] if messages else text
        for text, messages in zip(texts, prompts, strict=True)
    ]
