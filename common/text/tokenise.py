"""Rows of text as token ids: prompts and completions apart, within their limits."""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from common import distributed
from common.config.stages import CommonConfig
from common.text.example import Example, Vocabulary
from common.text.schemas import Row, content

CHUNK_ROWS = 1000  # texts per tokenizer call: its encodings take far more memory than the ids
LONGEST_CUE = 100  # characters behind the last blank line that are taken for a cue

CUE = "TL;DR:"
TOO_LONG = "prompt over max_prompt_length"  # a reason to drop a row
_POST = re.compile(r"(?:\A|\n\n)POST:")
_HEADER_LINES = re.compile(r"(?:SUBREDDIT:[^\n]*\n+)?(?:TITLE:[^\n]*\n+)?")
# Where a body may be cut, best first; group 1 is what is kept, and is never blank.
_CUTS = (
    re.compile(r"(.*\S)\s*\n", re.DOTALL),  # before a line break
    re.compile(r"(.*[.!?][\"')\]]*)\s", re.DOTALL),  # behind a sentence
    re.compile(r"(.*\S)\s", re.DOTALL),  # behind a word
)


class TokenisedText(NamedTuple):
    """A prompt or a completion, as it is trained."""

    text: str
    ids: list[int]  # none of a prompt that no cut makes fit
    num_tokens: int  # before the cut, with bos or stop token

    @property
    def is_truncated(self) -> bool:
        """Whether tokens were cut off."""
        return len(self.ids) < self.num_tokens


class TokenisedRow(NamedTuple):
    """A row as an example, and what a report says about it."""

    example: Example
    prompt: TokenisedText
    completions: list[TokenisedText]
    drop_reason: str  # empty for a row that is kept


@distributed.tokenizer_threads()
def tokenize_rows(
    rows: Sequence[Row],
    vocabulary: Vocabulary,  # with a fast tokenizer, to cut the body of a prompt
    config: CommonConfig,
) -> list[TokenisedRow]:
    """Tokenise prompts and completions separately, and find the rows to drop.

    Nothing is put between them: a row brings its own space or line break. A completion ends at its
    first stop token; one is appended where there is none. What is longer than
    `max_completion_length` is cut there and then ends without a stop token. Rows are dropped when a
    prompt or a completion is blank, a pair is identical, a prompt's header and cue alone, or a
    conversation, are too long, or its template leaves out part of the answer.
    """
    tokenised: list[TokenisedRow] = []
    remaining = iter(distributed.progress_bar("tokenising", len(rows), unit="row", items=rows))
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        prompts = _tokenize_prompts(chunk, vocabulary.tokenizer, config)
        texts = [text for row in chunk for text in row.completions]
        encoded = iter(tokenize_completions(texts, vocabulary, config.max_completion_length))
        for row, prompt in zip(chunk, prompts, strict=True):
            completions = list(islice(encoded, len(row.completions)))
            drop_reason = _drop_reason(row, prompt, completions)
            example = Example(
                row=row.number,
                prompt=prompt.text,
                prompt_ids=prompt.ids,
                completions=[text.ids for text in completions],
                columns=row.columns,
                source=source_of(row),
                messages=row.messages,
            )
            tokenised.append(TokenisedRow(example, prompt, completions, drop_reason))
    return tokenised


def source_of(row: Row) -> str:
    """Where the row comes from, so that accuracies can be reported separately.

    `trl-lib/tldr-preference` mixes CNN/DailyMail articles into its validation split and has no
    column for it; TRL's `examples/datasets/tldr_preference.py` gives them no SUBREDDIT and no
    POST. Rows of `openai/summarize_from_feedback` have a `batch` column instead. It is the column
    `source` if the row has one, else `tldr`, `cnn_dm` or `other`.
    """
    source, batch = row.columns.get("source"), row.columns.get("batch")
    if isinstance(source, str):
        return source
    if isinstance(batch, str) and "cnndm" in batch:
        return "cnn_dm"
    prompt = content(row.messages[-1]) if row.messages else row.prompt
    if prompt.startswith("SUBREDDIT: r/"):
        return "tldr"
    is_article = prompt.startswith("TITLE:") and "\n\nPOST:" not in prompt
    return "cnn_dm" if is_article else "other"


def _tokenize_prompts(
    rows: Sequence[Row], tokenizer: Any, config: CommonConfig
) -> list[TokenisedText]:
    """Prompts that fit, without ids where no cut makes one fit: a text with the tokenizer's bos.

    A conversation is the tokens of its template's text, as in `apply_chat_template`.
    """
    leading = leading_ids(tokenizer)
    opening = tokenizer.decode(leading)
    room = config.max_prompt_length - len(leading)
    result: list[TokenisedText] = []
    for row, ids in zip(rows, encode([row.prompt for row in rows], tokenizer), strict=True):
        if row.messages:
            fits = len(ids) <= config.max_prompt_length
            result.append(TokenisedText(row.prompt, ids if fits else [], len(ids)))
            continue
        prompt, ids = row.prompt.removeprefix(opening), without_leading(ids, leading)
        whole = leading + ids
        if len(ids) > room and config.prompt_truncation == "start":
            ids = ids[len(ids) - room :]
            prompt = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        elif len(ids) > room:
            shorter = truncate_prompt(prompt, tokenizer, room)
            prompt, ids = shorter or (prompt, [])
        result.append(TokenisedText(prompt, leading + ids if ids else [], len(whole)))
    return result


def truncate_prompt(
    prompt: str,  # of more than `max_length` tokens
    tokenizer: Any,  # a fast one, which knows the characters of each token
    max_length: int,  # tokens, header and cue included
) -> tuple[str, list[int]] | None:
    """Cut the body of a prompt that is too long, as a TL;DR post; header and cue stay whole.

    None if these leave no room.
    """
    header, body, cue = split_prompt(prompt)
    encoding = tokenizer(header + body, add_special_tokens=False, verbose=False)
    budget = max_length - len(encode([cue], tokenizer)[0])
    while budget > 0:
        last_token = min(budget, len(encoding["input_ids"])) - 1
        kept = cut_body(body, max(0, encoding.token_to_chars(last_token).end - len(header)))
        if not kept.strip():
            return None
        shorter = header + kept + cue
        ids = encode([shorter], tokenizer)[0]
        if len(ids) <= max_length:
            return shorter, ids
        # A cut inside a word or a merge with the cue costs tokens. One less, not the excess: a
        # character may be several tokens, and dropping all of them may be too much.
        budget -= 1
    return None


def closing_cue(prompt: str) -> str:
    """The end of a prompt that is never cut, with the white space around; empty if it has none.

    It is `TL;DR:`, or what follows the last blank line, if that is short.
    """
    text = prompt.rstrip()
    _, blank_line, last = text.rpartition("\n\n")
    cue = last if blank_line and len(last) <= LONGEST_CUE else ""
    cue = CUE if text.endswith(CUE) else cue.strip()
    return prompt[len(text.removesuffix(cue).rstrip()) :] if cue else ""


def split_prompt(prompt: str) -> tuple[str, str, str]:
    """Split a prompt into header, body and cue, which joined give it back.

    The header reaches to `POST:` (or to the end of the title where there is none, as in the
    CNN/DailyMail rows). Header and cue may be empty.

    >>> split_prompt("POST: It sleeps. TL;DR:")
    ('POST:', ' It sleeps.', ' TL;DR:')
    """
    header = _HEADER_LINES.match(prompt)
    end = header.end() if header else 0
    post = _POST.search(prompt)
    if post and prompt.startswith(("SUBREDDIT:", "TITLE:", "POST:")):
        end = post.end()
    start = len(prompt) - len(closing_cue(prompt[end:]))
    return prompt[:end], prompt[end:start], prompt[start:]


def cut_body(body: str, limit: int) -> str:
    """The longest useful prefix of at most `limit` characters.

    Ends before the last line break that leaves some text (the rule of Stiennon et al. 2020), else
    behind the last sentence, else behind the last word, else at the limit.

    >>> cut_body("One sentence. Another one.", limit=20)
    'One sentence.'
    """
    window = body[: limit + 1]  # one more: the character behind the cut tells whether a word ends
    for pattern in _CUTS:
        match = pattern.match(window)
        if match:
            return match.group(1)
    return body[:limit].rstrip()


def tokenize_completions(
    completions: Sequence[str], vocabulary: Vocabulary, max_length: int
) -> list[TokenisedText]:
    """Completions that end in the first stop token they have, in an appended one, or cut short."""
    tokenizer, stop_ids = vocabulary.tokenizer, vocabulary.stop_ids
    # The text is cut, not only the ids: GPT-2 has a token for two line breaks, which a stop at one
    # would miss. Where the text is not that of the token (SentencePiece bytes), the ids decide.
    ids_of_stops = {tokenizer.decode([stop_id]): stop_id for stop_id in stop_ids}
    stops = [t for t, i in ids_of_stops.items() if t and encode([t], tokenizer) == [[i]]]
    pattern = re.compile("(" + ("|".join(map(re.escape, stops)) or "(?!)") + ")")
    split = [pattern.split(text, maxsplit=1) for text in completions]  # at the first stop's text
    result = []
    encoded = encode([text for text, *_ in split], tokenizer)
    for (text, *stop), ids in zip(split, encoded, strict=True):
        last = ids_of_stops[stop[0]] if stop else stop_ids[0]
        if not set(stop_ids).isdisjoint(ids):
            end = next(i for i, token in enumerate(ids) if token in stop_ids)
            ids, last = ids[:end], ids[end]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        ids = [*ids, last]
        result.append(TokenisedText(text, ids[:max_length], len(ids)))
    return result


def _drop_reason(row: Row, prompt: TokenisedText, completions: Sequence[TokenisedText]) -> str:
    """The reason to drop a row, empty if there is none."""
    is_equal = len(completions) == 2 and completions[0].ids == completions[1].ids
    is_cut = is_equal and completions[0].text != completions[1].text
    reasons = {
        "empty or no shared prompt": not prompt.text.strip(),
        TOO_LONG: not prompt.ids,
        "answer left out in part by the chat template": row.is_partial,
        "empty completion": any(not completion.text.strip() for completion in completions),
        "pair identical up to --max_completion_length": is_cut,
        "identical pair": is_equal,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def leading_ids(tokenizer: Any) -> list[int]:
    """Ids that a tokenizer puts in front of every text: the bos of Llama and Gemma, none of GPT-2.

    A model that was trained with them scores worse without them.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    texts = (tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in special)
    text, first = next((text, ids[0]) for text in texts if (ids := encode([text], tokenizer)[0]))
    whole = tokenizer(text, verbose=False)["input_ids"]
    return list(whole[: whole.index(first)])


def without_leading(ids: list[int], leading: list[int]) -> list[int]:
    """The ids without the leading ones, which some chat templates write into the text."""
    return ids[len(leading) :] if ids[: len(leading)] == leading else ids


def encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each text, without special tokens around them."""
    shared: dict[int, int] = {}  # one int object per id, not per token: 4 times less memory
    ids: list[list[int]] = []
    for start in range(0, len(texts), CHUNK_ROWS):
        chunk = list(texts[start : start + CHUNK_ROWS])
        # verbose=False: lengths beyond the model are handled here, not warned about.
        encoded = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        ids += [[shared.setdefault(i, i) for i in row] for row in encoded]
    return ids
