"""Claim: ROUGE is that of Google's `rouge-score` package, on real and on random texts.

And the share of distinct texts is that of those that differ by more than space. About
`common.text.overlap`.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from common.text import synthetic
from common.text.overlap import common_subsequence, distinct_share, rouge_l, rouge_n

SCORER = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
TEXTS = st.text(alphabet="abAB é1.\n'", max_size=60)


def check(candidate: str, reference: str) -> None:
    expected = SCORER.score(target=reference, prediction=candidate)
    assert rouge_n(candidate, reference) == pytest.approx(expected["rouge1"].fmeasure)
    assert rouge_n(candidate, reference, 2) == pytest.approx(expected["rouge2"].fmeasure)
    assert rouge_l(candidate, reference) == pytest.approx(expected["rougeL"].fmeasure)


@given(TEXTS, TEXTS)
def test_random_texts_score_as_in_the_package(candidate: str, reference: str) -> None:
    check(candidate, reference)


def test_summaries_score_as_in_the_package_against_their_posts() -> None:
    for row in synthetic.make_rows("preference", "validation", 20):
        check(row["chosen"], row["prompt"])
        check(row["prompt"], row["rejected"])


@pytest.mark.parametrize("texts", [("", ""), ("", "a"), ("a", ""), ("...", "a"), ("Ω", "Ω")])
def test_a_text_without_words_scores_0(texts: tuple[str, str]) -> None:
    check(*texts)
    assert rouge_l(*texts) == rouge_n(*texts) == 0


def test_the_longest_common_subsequence_is_that_of_the_usual_table() -> None:
    generator = random.Random(0)
    for _ in range(200):
        first, second = (generator.choices("abcd", k=generator.randrange(90)) for _ in range(2))
        table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, a in enumerate(first, start=1):
            for j, b in enumerate(second, start=1):
                best = max(table[i - 1][j], table[i][j - 1])
                table[i][j] = table[i - 1][j - 1] + 1 if a == b else best
        assert common_subsequence(first, second) == table[-1][-1]


def test_distinct_texts_are_those_that_differ_by_more_than_space():
    assert distinct_share([" a b", "a b ", "a b c", "A b c"]) == 3 / 4
