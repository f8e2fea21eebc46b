"""Claim: of a sweep the first outcomes are summed up, with the correction for those of a stage."""

import json
from pathlib import Path

import pytest

from experiments.records import ablations, make

OWN = {  # Student's t of 2 degrees: 4.303 alone, 6.205 for one of two
    "stage": "reward",
    "detail": "head",
    "flags": {},
    "patch": "",
    "then": [],
    "num_processes": 1,
    "outcome": "accuracy",
    "base_by_seed": [1.0, 2.0, 3.0],
    "together": {"family": 2},
}
LINES = [
    OWN | {"choice": "a", "by_seed": [2.0, 3.0, 4.1]},
    OWN | {"choice": "b", "by_seed": [2.0, 3.1, 3.6]},
    OWN | {"choice": "c", "by_seed": [1.0, 2.0, 3.0]},
    OWN | {"choice": "a", "by_seed": [9.0, 9.0, 9.0], "outcome": "gold", "together": {}},
]


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "assets" / "results"
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(make, "RECORDS", records)
    (records / "ablations").mkdir(parents=True)
    (records / "ablations" / "sweep.json").write_text(json.dumps({"effects": LINES}))


def test_the_page_has_the_first_outcome_of_each_stage():
    heads = (
        "| detail | choice | gold, points | KL, nats | matters? | n |\n|---|---|---|---|---|---|\n"
    )
    base = "| base | as in the recipe | 94.20 ± 1.69 | 1.65 ± 0.18 |  | 8 |\n"
    line = "| beta | 0.8 | -3.31 [-4.66, -1.95] | -0.68 * | no larger than 4.70 | 8 |\n"
    (make.RECORDS / "ablations" / "report.md").write_text(
        f"# T\n\n## dpo\n\n{heads}{base}{line}\n## grpo\n\n{heads}{base}"
    )
    _, *cells = make.cells(ablations.primary_table("ablations"))
    _, *of_dpo = make.cells(ablations.primary_table("ablations", "dpo"))
    assert cells[:2] == of_dpo
    assert cells[2][0] == "**grpo**: gold, points"
    assert cells[0] == ["**dpo**: gold, points", "as in the recipe", "94.20 ± 1.69", ""]
    assert cells[1] == ["beta", "0.8", "-3.31 [-4.66, -1.95]", "\N{LESS-THAN OR EQUAL TO} 4.70"]


def test_the_primary_outcome_of_a_stage_counts():
    (effects,) = ablations.primary_effects()["reward"].values()
    assert [effect.verdict for effect in effects] == [
        "yes",
        "no larger than 1.85",
        "no larger than 0.00",
    ]


def test_the_sentence_names_what_is_told_and_which_way():
    told = " ".join(ablations.what_matters().split())
    assert "task 1 of 1 do, by 3 paired seeds" in told
    assert "head (reward model): a (+1.0). These 1 of 3 choices" in told
    assert ", 1 of them for all tests (" in told  # 7.649 standard errors of 0.033


def test_the_picture_is_as_narrow_as_a_phone_needs():
    from PIL import Image

    with Image.open(ablations.draw()) as picture:
        assert picture.width < 700
