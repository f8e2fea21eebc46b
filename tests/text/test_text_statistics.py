"""Claim: repetition and copying count n-grams of words as their definitions say.

Targets: counts by hand, and a plain loop over all positions.
"""

import random

import pytest

from common.text.overlap import copied_share, distinct_share, repeated_share


def test_repetition_by_hand():
    assert repeated_share("a b c d", 3) == 0
    assert repeated_share("a b c a b c", 3) == pytest.approx(1 / 4)  # abc bca cab abc
    assert repeated_share("No no, NO no!", 3) == pytest.approx(1 / 2)  # words, whatever their case
    assert repeated_share("a b", 3) is None


def test_copying_by_hand():
    source = "my dog ate the cake"
    assert copied_share("My dog ate it", source, 2) == pytest.approx(2 / 3)
    assert copied_share("My dog ate it", source, 3) == pytest.approx(1 / 2)
    assert copied_share("My dog ate it", source, 4) == 0
    assert copied_share("the cake, the cake", source, 2) == pytest.approx(2 / 3)  # each time
    assert copied_share("ate dog", source, 2) == 0  # in this order only
    assert copied_share("ate", source, 2) is None
    assert copied_share("ate it", "ate", 2) == 0


def test_distinct_texts_are_those_that_differ_by_more_than_space():
    assert distinct_share([" a b", "a b ", "a b c", "A b c"]) == 3 / 4


def plain_shares(text: str, source: str, n: int) -> tuple[float, float]:
    words, there = text.split(), source.split()
    grams = [words[i : i + n] for i in range(len(words) - n + 1)]
    seen_before = [gram in grams[:i] for i, gram in enumerate(grams)]
    windows = [there[j : j + n] for j in range(len(there) - n + 1)]
    found = [gram in windows for gram in grams]
    return sum(seen_before) / len(grams), sum(found) / len(grams)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_shares_are_those_of_a_plain_loop(n):
    generator = random.Random(n)
    for _ in range(50):
        text, source = (
            " ".join(generator.choices("ab0", k=generator.randint(n, 12))) for _ in range(2)
        )
        expected = plain_shares(text, source, n)
        found = (repeated_share(text, n), copied_share(text, source, n))
        assert found == pytest.approx(expected)
