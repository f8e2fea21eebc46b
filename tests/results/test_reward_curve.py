"""Claim: the curve of the second task shows what is recorded of its seeds, means and intervals."""

import json
import math
from pathlib import Path

import pytest

from tests.results import make, reward_curve, tables


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two seeds of two evaluations, and of the chat model's pass@1 and pass@4."""
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    monkeypatch.setattr(make, "ROOT", tmp_path)
    folder = tmp_path / reward_curve.PART
    for seed, shift in ((0, 0.0), (1, 0.1)):
        evaluated = [(0, 0.0, 0.1 + shift), (10, 1.0 + shift, 0.5 + shift)]
        records = [dict(zip(("step", "eval_kl", "eval_reward"), e, strict=True)) for e in evaluated]
        records.insert(1, {"step": 5, "reward": 0.9, "kl": 0.9})  # of training
        passes = {"pass@1": {"mean": 0.1 + shift}, "pass@4": {"mean": 0.3 + shift}}
        trained = {"name": "grpo", "pass_rates": {"one_sentence": {"pass@1": {"mean": 0.9}}}}
        systems = [trained, {"name": "chat", "pass_rates": {"one_sentence": passes}}]
        for name, text in (
            ("grpo/metrics.jsonl", "".join(json.dumps(r) + "\n" for r in records)),
            ("evaluation/results.json", json.dumps({"systems": systems})),
        ):
            (folder / f"seed_{seed}" / name).parent.mkdir(parents=True)
            (folder / f"seed_{seed}" / name).write_text(text)
    return folder


def test_points_are_means_over_seeds(recorded: Path):
    found = {point.name: point for point in reward_curve.points(recorded)}
    assert list(found) == ["GRPO, step 0", "GRPO, step 10", "best of 1", "best of 4"]
    last = found["GRPO, step 10"]
    assert (last.kls, last.rewards) == ((1.0, 1.1), (0.5, 0.6))
    half_width = 12.706 * 0.1 / 2  # Student's, one degree of freedom; sd / sqrt(2) is 0.1 / 2
    assert last.reward.high == pytest.approx(0.55 + half_width, abs=1e-4)
    assert found["best of 1"].kl.mean == 0
    assert found["best of 4"].kl.mean == pytest.approx(math.log(4) - 3 / 4)
    assert found["best of 4"].reward.mean == pytest.approx(0.35)


def test_the_table_and_the_picture_are_made(recorded: Path, tmp_path: Path):
    _, _, *table = reward_curve.shown().splitlines()
    assert [cell.strip() for cell in table[3].split("|")[1:-1]] == [
        *("GRPO, step 10", "1.05 [0.41, 1.69]", "55.0 [-8.5, 118.5]", "2")
    ]
    assert "at most 0.64" in table[5]
    short = reward_curve.table(is_short=True).splitlines()[2:]
    names = ["GRPO, step 0", "best of 4", "GRPO, step 10"]
    assert [line.split("|")[1].strip() for line in short] == names
    picture = reward_curve.draw()
    assert picture == tmp_path / "assets" / "one-sentence.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_samples_stand_below_the_titles_of_their_papers(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
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
    (recorded / "samples.jsonl").write_text("\n".join(lines))
    found = [row.split("|")[1:-1] for row in tables.samples(recorded.name).splitlines()]
    assert [cell.strip() for cell in found[0]] == ["summary by", "A title", "Another"]
    assert [cell.strip() for cell in found[3]] == ["grpo", "Ours.", "Ours."]
    assert [cell.strip() for cell in found[4]] == ["sft", *["Ours, and [...]"] * 2]
