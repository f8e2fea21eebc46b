"""Words that texts share: ROUGE (Lin 2004).

Tokens are those of Google's `rouge-score` without stemming, so that numbers compare: lower case,
runs of a-z and 0-9; anything else separates. Another alphabet has no tokens, and a score of 0.
"""

import re
from collections import Counter

WORD = re.compile(r"[a-z0-9]+")


def rouge_n(candidate: str, reference: str, n: int = 1) -> float:
    """F1 of ROUGE-N: overlap of n-grams, each counted as often as both texts have it."""
    counts, expected = (ngrams(WORD.findall(t.lower()), n) for t in (candidate, reference))
    return _f1((counts & expected).total(), counts.total(), expected.total())


def rouge_l(candidate: str, reference: str, word: re.Pattern[str] = WORD) -> float:
    """F1 of ROUGE-L: longest common subsequence of the words, each text taken as one sentence.

    Lin 2004, eq. 2 to 4 with beta = 1.

    >>> rouge_l("the cat sat", "the cat ran home today")  # 2 of 3 and 2 of 5 words
    0.5
    """
    tokens, expected = (word.findall(text.lower()) for text in (candidate, reference))
    return _f1(common_subsequence(tokens, expected), len(tokens), len(expected))


def common_subsequence(first: list[str], second: list[str]) -> int:
    """Length of the longest common subsequence.

    Hyyro 2004, "Bit-parallel LCS-length computation revisited": a column of the usual table is the
    bits of one integer, so a word of `second` costs a few operations, not one per word of `first`.
    """
    positions: dict[str, int] = {}
    for i, word in enumerate(first):
        positions[word] = positions.get(word, 0) | 1 << i
    whole = (1 << len(first)) - 1
    column = whole  # bit i is 0 where the subsequence grows by first[i]
    for word in second:
        matches = column & positions.get(word, 0)
        column = (column + matches | column - matches) & whole
    return len(first) - column.bit_count()


def ngrams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    """Counts of each sequence of n neighbouring tokens; empty below n tokens."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _f1(num_shared: int, num_candidate: int, num_reference: int) -> float:
    """Harmonic mean of precision and recall, in [0, 1]; 0 where either text has no token."""
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / num_candidate, num_shared / num_reference
    return 2 * precision * recall / (precision + recall)


def distinct_share(texts: list[str]) -> float:
    """Number of different texts, white space around them aside, by the number of texts."""
    return len({text.strip() for text in texts}) / len(texts)
