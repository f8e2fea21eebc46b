"""Claim: the curve of the second task shows what is recorded of its seeds, means and intervals."""

import json
import math
from pathlib import Path

import pytest

from experiments.records import make, reward_curve


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two seeds of three evaluations, and of pass@1, @4 and @16 of both models."""
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    monkeypatch.setattr(make, "ROOT", tmp_path)
    folder = tmp_path / reward_curve.PART
    for seed, shift in ((0, 0.0), (1, 0.1)):
        evaluated = [(0, 0.0, 0.1 + shift), (5, 1.8 + shift, 0.2), (10, 2.0 + shift, 0.5 + shift)]
        records = [dict(zip(("step", "eval_kl", "eval_reward"), e, strict=True)) for e in evaluated]
        records.insert(1, {"step": 5, "reward": 0.9, "kl": 0.9})  # of training
        passes = {"pass@1": 0.1 + shift, "pass@4": 0.3 + shift, "pass@16": 0.6}
        systems = [
            {
                "name": name,
                "pass_rates": {"one_sentence": {at: {"mean": m} for at, m in own.items()}},
            }
            for name, own in (("grpo", {"pass@1": 0.4 + shift, "pass@16": 1.0}), ("chat", passes))
        ]
        results = {
            "systems": systems,
            "reference_completions": {"rewards": {"one_sentence": {"mean": 0.125}}},
        }
        for name, text in (
            ("grpo/metrics.jsonl", "".join(json.dumps(r) + "\n" for r in records)),
            ("evaluation/results.json", json.dumps(results)),
        ):
            (folder / f"seed_{seed}" / name).parent.mkdir(parents=True)
            (folder / f"seed_{seed}" / name).write_text(text)
    return folder


def rows(table: str) -> list[list[str]]:
    """Cells of a table, its head aside."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_policies_are_means_over_seeds(recorded: Path):
    found = {row[0]: row[1:] for row in rows(reward_curve.shown())}
    assert list(found) == [
        *("GRPO, step 0", "GRPO, step 10", "GRPO, trained, 16 samples"),
        *("the chat model", "best of 4", "best of 16", "the author"),
    ]
    # Student's, one degree of freedom: 12.706 * 0.1 / 2, as sd / sqrt(2) is 0.1 / 2.
    assert found["GRPO, step 10"] == ["2.05 [1.41, 2.69]", "55.0 [-8.5, 118.5]", "2"]
    assert found["GRPO, trained, 16 samples"] == ["2.05 [1.41, 2.69]", "45.0 [-18.5, 108.5]", "2"]
    assert found["the chat model"][0] == "0.00"
    assert found["best of 4"] == [f"at most {math.log(4) - 3 / 4:.2f}", "35.0 [-28.5, 98.5]", "2"]
    assert found["the author"] == ["\N{EN DASH}", "12.5", "2"]
    short = [row[0] for row in rows(reward_curve.short())]
    assert short == ["the chat model", "best of 16", "GRPO, trained, 16 samples"]


def test_differences_are_of_the_same_seed(recorded: Path):
    assert rows(reward_curve.differences()) == [
        ["GRPO, trained, 16 samples, compared with the chat model", "30.0 [30.0, 30.0]"],
        ["GRPO, trained, 16 samples, compared with best of 16", "-15.0 [-78.5, 48.5]"],
        # At step 5 one seed is no farther away than log 16 - 15 / 16 = 1.835.
        ["GRPO, step 10, compared with best of 16", "-5.0 [-68.5, 58.5]"],
    ]


def test_the_picture_is_drawn(recorded: Path, tmp_path: Path):
    picture = reward_curve.draw()
    assert picture == tmp_path / "assets" / "one-sentence.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
