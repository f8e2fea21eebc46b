"""Prompts cut in their body.

The post of a TL;DR prompt is cut; the header (subreddit, title) and the closing cue stay. Other
prompts have a cue too: what follows their last blank line.
"""

import re

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


def closing_cue(prompt: str) -> str:
    """The end of a prompt that is never cut, with the white space around; empty if it has none.

    It is `TL;DR:`, or what follows the last blank line, if that is short.
    """
    text = prompt.rstrip()
    _, blank_line, last = text.rpartition("\n\n")
    cue = last if blank_line and len(last) <= LONGEST_CUE else ""
    cue = _CUE if text.endswith(_CUE) else cue.strip()
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
