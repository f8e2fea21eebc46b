"""How much a text repeats itself, and how much of another text it copies, in sequences of words.

Words are those of `common.rouge` (lower case, a-z and 0-9), so the numbers do not depend on a
tokenizer, and a text in another alphabet has none.
"""

from common.rouge import ngrams, words


def repeated_share(text: str, n: int) -> float | None:
    """Share of a text's n-grams that occurred in it before: 1 - distinct / all.

    This is seq-rep-n of Welleck et al. 2020 ("Neural text generation with unlikelihood training"),
    on words in the place of tokens.

    Returns:
        In [0, 1), 0 if all differ; None for a text of fewer than n words, which has no n-gram.
    """
    counts = ngrams(words(text), n)
    return 1 - len(counts) / counts.total() if counts else None


def copied_share(text: str, source: str, n: int) -> float | None:
    """Share of a text's n-grams, each occurrence counted, that are found in the source.

    One minus the share of novel n-grams of See et al. 2017 ("Get to the point").

    Returns:
        In [0, 1]; None for a text of fewer than n words.
    """
    counts, there = ngrams(words(text), n), ngrams(words(source), n)
    found = sum(number for ngram, number in counts.items() if ngram in there)
    return found / counts.total() if counts else None


def distinct_share(texts: list[str]) -> float:
    """Number of different texts, white space around them aside, by the number of texts."""
    return len({text.strip() for text in texts}) / len(texts)
