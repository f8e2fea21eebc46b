"""Claim: tables of generations show what results.json holds, a dash where it holds nothing."""

from common.evaluation.records import Results
from common.report.tables import generation_tables

INTERVAL = {"mean": 0.5, "low": 0.25, "high": 0.75, "count": 4}
RATE = {
    "a": "dpo",
    "b": "sft",
    "judge": "gold",
    "win_rate": 0.625,
    "low": 0.5,
    "high": 0.75,
    "num_wins": 2,
    "num_ties": 1,
    "num_losses": 1,
    "num_not_judged": 3,
    "length_difference": -1.25,
    "length_controlled": None,
}


def test_what_was_measured_is_shown_and_what_was_not_is_a_dash():
    system = {"name": "dpo", "length": 7.0, "length_interval": INTERVAL, "kl": None}
    system |= {"distinct_completions": 0.75, "rouge_l": INTERVAL}
    system |= {"rewards": {"gold": INTERVAL, "rm": None}}
    references = {**system, "rewards": {"gold": INTERVAL}}
    systems = [{"name": "rm"}, system]
    results = Results(systems=systems, reference_completions=references, win_rates=[RATE])
    quality, rewards, rates = generation_tables(results)
    shown = dict(zip(quality.headers, quality.rows[0], strict=True))
    assert (shown["ROUGE-L"], shown["length"]) == ("50.0 [25.0, 75.0]", "0.5 [0.2, 0.8]")
    assert (shown["KL"], shown["distinct %"]) == ("–", "75.0")
    assert [row[0] for row in quality.rows] == ["dpo", "reference completion"]
    assert rewards.headers == ["system", "gold", "rm"]
    assert rewards.rows[1] == ["reference completion", "0.500 [0.250, 0.750]", "–"]
    expected = ["dpo against sft", "gold", "62.5 [50.0, 75.0]", "–", "2", "1", "1", "3", "-1.2"]
    assert rates.rows == [expected]


def test_an_evaluation_without_generations_has_no_such_table():
    assert generation_tables(Results(systems=[{"name": "rm"}])) == []
    assert generation_tables(Results()) == []
