"""Claim: the picture of a chain has the intervals that hold where a prompt has several pairs."""

from pathlib import Path

import pytest

from experiments.records import chain_picture, make


def test_accuracy_is_drawn_with_its_interval_over_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn = []
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(
        chain_picture, "draw_accuracy", lambda _, results, __: drawn.append(results)
    )
    own = {"accuracy": 0.6, "low": 0.58, "high": 0.62}
    ends = {"prompt_low": 0.5, "prompt_high": 0.7}
    compared = [
        {"name": "dpo logp", "accuracy": {**own, "accuracy": 0.4, **ends}},
        {"name": "dpo implicit_reward", "accuracy": {**own, **ends}},
        {"name": "dpo mean_logp", "accuracy": {**own, "accuracy": 0.5, **ends}},
    ]
    results = {"systems": [{"name": "dpo", "accuracy": own}], "num_pairs": 1_226, "num_prompts": 96}
    results["comparison"] = {"systems": compared}
    picture = chain_picture.draw("demo", results)
    assert picture == tmp_path / "assets" / "demo.png"
    assert picture.is_file()
    accuracy = drawn[0]["systems"][0]["accuracy"]
    assert (accuracy["low"], accuracy["accuracy"], accuracy["high"]) == (0.5, 0.6, 0.7)
