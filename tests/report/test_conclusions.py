"""Claim: a report says in words what differs, and calls nothing equal. About `common.report`."""

from pathlib import Path

import pytest

from common.evaluation.accuracy import PreferenceAccuracy
from common.evaluation.results import (
    ComparedScore,
    Comparison,
    Difference,
    Results,
    System,
    WinRate,
)
from common.report import conclusions
from common.report.evaluation_report import terminal_text, write_report

SCORES = {"rm": "", "dpo": "implicit_reward", "sft": "logp"}  # by system


def accuracies(ends: dict[tuple[str, str], tuple[float | None, float | None]]) -> Results:
    """Results of the systems on pairs, every difference by the ends of its interval."""
    measured = PreferenceAccuracy(0.5, 0.4, 0.6, 100, 0)
    names = {system: f"{system} {score}".strip() for system, score in SCORES.items()}
    scores = [ComparedScore(name, measured) for name in [*names.values(), "dpo logp_per_token"]]
    differences = [
        Difference(names[a], names[b], ((low or 0) + (high or 0)) / 2, low, high, 1, 1, 1.0)
        for (a, b), (low, high) in ends.items()
    ]
    differences.append(Difference(names["rm"], "dpo logp_per_token", 0.9, 0.8, 1, 9, 0, 0.0))
    systems = [
        System(name, "policy", name, scored_by=score.replace("_", " "), accuracy=measured)
        for name, score in SCORES.items()
    ]
    systems[0] = System("rm", "reward_model", "rm", scored_by="reward", accuracy=measured)
    comparison = Comparison(100, 100, scores, differences)
    return Results("rows", num_pairs=100, systems=systems, comparison=comparison)


def win_rate(a: str, b: str, low: float | None, high: float | None, judge: str) -> WinRate:
    mean = 0.5 if low is None or high is None else (low + high) / 2
    return WinRate(a, b, judge, mean, low, high, 1, 1, 1, 0, 0.0, None)


def sentences(results: Results) -> list[str]:
    return [line.removeprefix("- ") for line in conclusions.conclusions(results).splitlines()]


def test_differences_of_accuracy_by_hand() -> None:
    """Of each system the score of the systems' table; the one that is ahead comes first."""
    ends = {("rm", "dpo"): (0.02, 0.08), ("rm", "sft"): (0.1, 0.2), ("dpo", "sft"): (-0.01, 0.05)}
    accuracy, note = sentences(accuracies(ends))
    assert accuracy == (
        "Preference accuracy, difference in points: rm is above dpo (5.0 [2.0, 8.0]), sft (15.0 "
        "[10.0, 20.0]); no difference was found between dpo and sft (2.0 [-1.0, 5.0])."
    )
    assert "There are 3 comparisons here; no interval is corrected for their number" in note
    (turned, _) = sentences(accuracies({("rm", "dpo"): (-0.08, -0.02)}))
    assert turned.endswith("dpo is above rm (5.0 [2.0, 8.0]).")


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.0, 0.1), "no difference was found between rm and dpo (5.0 [0.0, 10.0])"),
        ((-0.1, 0.0), "no difference was found between dpo and rm (5.0 [0.0, 10.0])"),
        ((0.0, 0.0), "no difference was found between rm and dpo (0.0 [0.0, 0.0])"),
        ((None, None), "there are too few prompts to compare rm and dpo"),
    ],
)
def test_what_an_interval_does_not_exclude_is_no_difference_and_not_equal(ends, words) -> None:
    accuracy, _ = sentences(accuracies({("rm", "dpo"): ends}))
    assert accuracy == f"{conclusions.ACCURACY}: {words}."


def test_every_judge_says_which_completions_win() -> None:
    rates = [
        win_rate("dpo", "sft", 0.6, 0.8, "gold"),
        win_rate("grpo", "sft", 0.3, 0.4, "gold"),
        win_rate("grpo", "dpo", 0.4, 0.7, "anna"),
        win_rate("dpo", "sft", None, None, "anna"),
    ]
    gold, anna, note = sentences(Results(win_rates=rates))
    assert gold == (
        "Completions judged by gold, win rate in %: dpo is above sft (70.0 [60.0, 80.0]); "
        "sft is above grpo (65.0 [60.0, 70.0])."
    )
    assert anna == (
        "Completions judged by anna, win rate in %: no difference was found between grpo and dpo "
        "(55.0 [40.0, 70.0]); there are too few prompts to compare dpo and sft."
    )
    assert "There are 4 comparisons" in note


def test_of_many_systems_each_is_compared_with_one() -> None:
    names = ["a", "b", "c", "d", "e"]
    pairs = [(b, a) for i, a in enumerate(names) for b in names[i + 1 :]]
    results = Results(win_rates=[win_rate(b, a, 0.6, 0.8, "gold") for b, a in pairs])
    sentence, note = sentences(results)
    assert sentence.count("is above a (") == len(names) - 1 == sentence.count("(")
    assert "There are 4 comparisons" in note
    measured = {n: PreferenceAccuracy(0.5 + (n == "c") / 10, 0, 1, 9, 0) for n in names}
    results.systems = [System(n, "reward_model", n, accuracy=measured[n]) for n in names]
    differences = [Difference(a, b, 0.1, 0.05, 0.15, 1, 1, 0.01) for b, a in pairs]
    scores = [ComparedScore(name, accuracy) for name, accuracy in measured.items()]
    results.comparison = Comparison(9, 9, scores, differences)
    accuracy = sentences(results)[0]
    assert accuracy.count("(") == len(names) - 1
    assert "a is above c" in accuracy
    assert "c is above d" in accuracy


def test_the_first_screen_and_the_terminal_have_the_words(tmp_path: Path) -> None:
    results = accuracies({("rm", "dpo"): (0.02, 0.08)})
    html, markdown, *_ = write_report(results, tmp_path)
    for page in (html.read_text(), markdown.read_text()):
        words = page.index("rm is above dpo (5.0 [2.0, 8.0])")
        assert page.index("What differs") < words < page.index("accuracy by")
    assert "rm is above dpo (5.0 [2.0, 8.0])" in " ".join(terminal_text(results).split())
    results.comparison = None  # of one system nothing is compared
    _, markdown, *_ = write_report(results, tmp_path)
    assert "What differs" not in markdown.read_text()
