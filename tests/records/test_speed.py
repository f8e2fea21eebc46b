"""Claim: speed beside TRL is told by sampled token where both sides sample."""

import json
from pathlib import Path

import pytest

from experiments.records import make, speed


def test_speed_is_per_token_where_both_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    monkeypatch.setattr(make, "ROOT", tmp_path)
    folder = tmp_path / "bench-tiny"
    folder.mkdir()
    lengths = {"dpo": (None, None), "grpo-1x8": (20.0, 40.0)}
    rows = [
        {
            **{"row": name, "ratio": 3.0, "memory_ratio": 0.5, "reach": 2.0},
            **{"ours": {"completion_length": ours}, "trl": {"completion_length": theirs}},
        }
        for name, (ours, theirs) in lengths.items()
    ]
    (folder / "results.json").write_text(json.dumps({"rows": rows}))
    table = "| row | goal |\n| --- | --- |\n| dpo | 2 |\n| grpo-1x8 | 2 |\n\nmachine\n"
    (folder / "table.md").write_text(table)
    lines = [line.split("|")[1:-1] for line in speed.table().splitlines()]
    assert [cell.strip() for cell in lines[2]] == ["4 layers, 256 wide", "3.0 (0.50)", "1.5 (0.50)"]
    assert speed.against_trl("bench-tiny").splitlines()[2:] == [
        *("| row | ratio per token |", "| --- | --- |", "| dpo |  |", "| grpo-1x8 | 1.50 |"),
    ]
    assert speed.draw("bench-tiny") == tmp_path / "assets" / "bench-tiny.png"
    assert (tmp_path / "assets" / "bench-tiny.png").read_bytes().startswith(b"\x89PNG")
