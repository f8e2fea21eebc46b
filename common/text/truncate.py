"""Texts as token ids, and prompts cut to a number of them.

The post of a TL;DR prompt is cut; the header (subreddit, title) and the closing cue stay. Other
prompts have a cue too: `--prompt_cue`, else what follows their last blank line.
"""

import re
from collections.abc import Sequence
from typing import Any

CHUNK_ROWS = 1000  # texts per tokenizer call: its encodings take far more memory than the ids
LONGEST_CUE = 100  # characters behind the last blank line that are taken for a cue

_CUE = "TL;DR:"
_POST = re.compile(r"(?:\A|\n\n)POST:")
_HEADER_LINES = re.compile(r"(?:SUBREDDIT:[^\n]*\n+)?(?:TITLE:[^\n]*\n+)?")
# Where a body may be cut, best first; group 1 is what is kept, and is never blank.
_CUTS = (
    re.compile(r"(.*\S)\s*\n", re.DOTALL),  # before a line break
    re.compile(r"(.*[.!?][\"')\]]*)\s", re.DOTALL),  # behind a sentence
    re.compile(r"(.*\S)\s", re.DOTALL),  # behind a word
)


def closing_cue(prompt: str, cue: str = "") -> str:
    """The end of a prompt that is never cut, with the white space around; empty if it has none.

    It is the `cue`, or, if none is given, what follows the last blank line, if that is short.
    """
    text = prompt.rstrip()
    if not cue:
        _, blank_line, last = text.rpartition("\n\n")
        cue = last if blank_line and len(last) <= LONGEST_CUE else ""
    cue = cue.strip()
    return prompt[len(text.removesuffix(cue).rstrip()) :] if cue and text.endswith(cue) else ""


def split_prompt(prompt: str, fallback_cue: str = "") -> tuple[str, str, str]:
    """Split a prompt into header, body and cue, which joined give it back.

    The header reaches to `POST:` (or to the end of the title where there is none, as in the
    CNN/DailyMail rows). The cue is a closing `TL;DR:` with the white space before it, or, in a
    prompt without one, the `fallback_cue` if it ends in that. Header and cue may be empty.
    """
    header = _HEADER_LINES.match(prompt)
    end = header.end() if header else 0
    post = _POST.search(prompt)
    if post and prompt.startswith(("SUBREDDIT:", "TITLE:", "POST:")):
        end = post.end()
    fallback_cue = fallback_cue if prompt[end:].endswith(fallback_cue) else ""
    start = len(prompt) - len(closing_cue(prompt[end:], _CUE) or fallback_cue)
    return prompt[:end], prompt[end:start], prompt[start:]


def cut_body(body: str, limit: int) -> str:
    """The longest useful prefix of at most `limit` characters.

    Ends before the last line break that leaves some text (the rule of Stiennon et al. 2020), else
    behind the last sentence, else behind the last word, else at the limit.
    """
    window = body[: limit + 1]  # one more: the character behind the cut tells whether a word ends
    for pattern in _CUTS:
        match = pattern.match(window)
        if match:
            return match.group(1)
    return body[:limit].rstrip()


def truncate_prompt(
    prompt: str,  # of more than `max_length` tokens
    tokenizer: Any,  # a fast one, which knows the characters of each token
    max_length: int,  # tokens, header and cue included
    fallback_cue: str = "",  # of a prompt that has no `TL;DR:`
) -> tuple[str, list[int]] | None:
    """Cut the body of a prompt that is too long; header and cue stay whole.

    Returns:
        The shorter prompt and its ids, at most `max_length`; None if header and cue leave no room.
    """
    header, body, cue = split_prompt(prompt, fallback_cue)
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
