"""Claim: the tables of a chain show what is recorded of its seeds, paired by seed."""

import json
from pathlib import Path

import pytest

from common.evaluation.records import Results
from experiments.records import chains, make


def test_systems_are_set_beside_another_of_the_same_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    for seed, (own, its) in enumerate(((20.0, 25.0), (10.0, 16.0))):
        folder = tmp_path / "scitldr" / f"seed_{seed}" / "evaluation"
        folder.mkdir(parents=True)
        systems = [
            {"name": name, "kind": "policy", "length": {"mean": length}, "rouge_l": 0.25}
            for name, length in {"dpo": own, "sft": its}.items()
        ]
        systems.append({"name": "reward", "kind": "reward_model"})
        rates = [
            {"a": a, "b": b, "judge": judge, "length_controlled": {"win_rate": rate}}
            for a, b, judge, rate in (
                ("dpo", "sft", "longer", 0.25),
                ("dpo", "reference", "reward", 0.125),
                ("dpo", "sft", "reward", 0.75),
            )
        ]
        results = {"systems": systems, "win_rates": rates}
        (folder / "results.json").write_text(json.dumps(results))
        lines = [
            {
                "dpo": [{"rewards": {"reward": 0.5}, "stopped": True}],
                "sft": [{"rewards": {"reward": 2.0}, "stopped": stopped}],  # -1 where it did not
            }
            for stopped in (True, False)
        ]
        make.write_jsonl(folder / make.REWARDS, lines)
    row = chains.beside("scitldr", "sft", ["dpo"]).splitlines()[-1]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    found = "-5.5 [-11.9, 0.9]"  # -5.5 +- 12.706 * 0.7071 / sqrt(2)
    assert cells == ["dpo", "\N{EN DASH}", "0.00", "0.0", found, "75.0"]


def test_samples_stand_below_the_titles_of_their_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    prompts = (
        "<|im_start|>user\nIn 8 to 16 words:\n\nA title\n\nIts text, in 9 words:\n\nnone",
        "TITLE: Another\n\nPOST: Text.\n\nTL;DR:",
    )
    systems = {
        "grpo": {"completion": "Ours.", "stopped": True},
        "sft": {"completion": "Ours, and", "stopped": False},
    }
    lines = [
        json.dumps({"prompt": p, "reference": {"completion": "Own."}, "systems": systems})
        for p in prompts
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    found = [row.split("|")[1:-1] for row in chains.samples(".", 2).splitlines()]
    assert [cell.strip() for cell in found[0]] == ["summary by", "A title", "Another"]
    assert [cell.strip() for cell in found[3]] == ["grpo", "Ours.", "Ours."]
    assert [cell.strip() for cell in found[4]] == ["sft", *["Ours, and [...]"] * 2]


def test_accuracy_is_drawn_with_its_interval_over_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn = []
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(chains, "draw_accuracy", lambda _, results, __: drawn.append(results))
    own = {"accuracy": 0.6, "low": 0.58, "high": 0.62}
    ends = {"prompt_low": 0.5, "prompt_high": 0.7}
    compared = [
        {"name": f"dpo {score}", "accuracy": {**own, "accuracy": accuracy, **ends}}
        for score, accuracy in (("logp", 0.4), ("implicit_reward", 0.6), ("mean_logp", 0.5))
    ]
    results = Results(
        num_pairs=1_226,
        num_prompts=96,
        systems=[{"name": "dpo", "accuracy": own}],
        comparison={"systems": compared},
    )
    monkeypatch.setattr(chains, "evaluations", lambda part: {"0": results})
    assert chains.draw("demo") == tmp_path / "assets" / "demo.png"
    accuracy = drawn[0].systems[0]["accuracy"]
    assert (accuracy["low"], accuracy["accuracy"], accuracy["high"]) == (0.5, 0.6, 0.7)
