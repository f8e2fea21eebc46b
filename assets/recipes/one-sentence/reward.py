"""Whether a completion is what the prompt asks for: one short sentence that says what a text says.

    --reward_funcs assets/recipes/one-sentence/reward.py:one_sentence

A check without a model, 0 or 1, so that `evaluate.py` tells its pass@k. It asks for the form, and
for words of the text; whether the sentence is true it cannot tell.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

SHORTEST, LONGEST = 8, 16  # words
SMALLEST_SHARE = 2 / 3  # of the long words, found in the text
STEM = 5  # letters of a long word, by which two are the same: trained, training


def one_sentence(completions: Sequence[Any], text: Sequence[str], **columns: Any) -> list[float]:
    """1 for a completion (messages) that `says_briefly` what the column `text` says, else 0."""
    pairs = zip(completions, text, strict=True)
    return [float(says_briefly(completion[-1]["content"], about)) for completion, about in pairs]


def says_briefly(sentence: str, text: str) -> bool:
    """Whether it is one sentence of 8 to 16 words, mostly the text's, no copy and no stutter."""
    sentence = sentence.strip()
    own, known = stems(sentence), {*stems(text)}
    return (
        re.fullmatch(r"[A-Z0-9][^.!?:;\n]*\.", sentence) is not None
        and SHORTEST <= len(sentence.split()) <= LONGEST
        and sentence[:-1].lower() not in text.lower()  # as the title with a full stop is
        and len(own) >= 3
        and max(Counter(own).values()) <= 2
        and sum(word in known for word in own) >= SMALLEST_SHARE * len(own)
    )


def stems(text: str) -> list[str]:
    """The beginnings of a text's long words."""
    return [word[:STEM] for word in re.findall(rf"[a-z]{{{STEM},}}", text.lower())]
