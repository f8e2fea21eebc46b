"""Claim: a table of README or `docs/` says what its record says, and pictures are drawn from it.

The pages are compared with what the records of this repository give: of chains, of the speed, of
the second task and of the ablations. One table is worked out by hand.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from common.evaluation.records import BASELINES, Results
from experiments.records import ablations, chains, make, reward_curve, speed, tables

PAGE = "# Page\n\nBefore.\n\n<!-- demo.mean -->\nold\n<!-- /demo.mean -->\n\nAfter.\n"
RECORD = {
    "git_commit": "0123456789abcdef",
    "date": "2026-01-01",
    "minutes": 12.3,
    "cpu": "a processor",
    "cores": 2,
    "packages": {"torch": "2.13.0"},
}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page: Path):
    """After a change of a record: `python -m experiments.records.tables`."""
    text = page.read_text()
    assert tables.filled(text, is_in_docs=page.parent != make.ROOT) == text
    places = [name for _, name, _, _ in tables.PLACE.findall(text)]
    assert len(places) == text.count("<!-- /")


@pytest.mark.parametrize(
    "draw",
    [
        *(partial(chains.draw, "demo"), partial(speed.draw, "bench-tiny")),
        *(reward_curve.draw, ablations.draw),
    ],
)
def test_a_picture_is_as_narrow_as_a_phone_needs(
    draw: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(make, "ROOT", tmp_path)
    picture = draw()
    assert picture.parent == tmp_path / "assets"
    with Image.open(picture) as image:
        assert (image.format, image.width < 700) == ("PNG", True)


def test_accuracy_is_drawn_with_its_interval_over_prompts(monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(chains, "draw_accuracy", lambda _, results, __: drawn.append(results))
    monkeypatch.setattr(chains, "draw_reward", lambda *_: None)
    monkeypatch.setattr(chains, "save", lambda *_: Path())
    own = {"accuracy": 0.6, "low": 0.58, "high": 0.62}
    ends = {"prompt_low": 0.5, "prompt_high": 0.7}
    compared = [
        {"name": f"dpo {score}", "accuracy": {**own, "accuracy": accuracy, **ends}}
        for score, accuracy in (("logp", 0.4), ("implicit_reward", 0.6), ("mean_logp", 0.5))
    ]
    systems = [{"name": "dpo", "accuracy": own}]
    results = Results(num_pairs=1_226, systems=systems, comparison={"systems": compared})
    monkeypatch.setattr(chains, "evaluations", lambda part: {"0": results})
    chains.draw("demo")
    accuracy = drawn[0].systems[0]["accuracy"]
    assert (accuracy["low"], accuracy["accuracy"], accuracy["high"]) == (0.5, 0.6, 0.7)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of one part with two seeds, in place of those there are."""
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    for seed, kl in enumerate((1.0, 3.0)):
        folder = tmp_path / "demo" / f"seed_{seed}" / "evaluation"
        folder.mkdir(parents=True)
        policy = {"name": "sft", "kind": "policy", "kl": {"mean": kl}, "rewards": {}}
        judge = {"name": "reward", "kind": "reward_model", "accuracy": {"accuracy": 0.75}}
        judge["minutes"] = 1.0  # of its run; nobody here trained the other
        results = {"systems": [judge, policy], "reference_completions": {"length": 7.0}}
        baselines = dict(zip(BASELINES, (0.5, 0.5, 0.625, 0.5), strict=True))
        compared = [{"name": n, "accuracy": {"accuracy": a}} for n, a in baselines.items()]
        results["comparison"] = {"systems": compared}
        (folder / "results.json").write_text(json.dumps(results))
    (tmp_path / "demo" / "record.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_a_changed_digit_of_the_page_or_of_the_record_is_found(recorded: Path):
    text = tables.filled(PAGE)
    lines = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()]
    assert ["mean of 2 seeds [95%]", "accuracy %", "KL", "length"] in lines
    assert ["reference completion", "\N{EN DASH}", "\N{EN DASH}", "7.0"] in lines
    assert ["ROUGE-L wins", "62.5", "\N{EN DASH}", "\N{EN DASH}"] in lines
    first_cells = [line[0] for line in lines if len(line) == 4]
    names = ["reference completion", "sft", "reward", "longer wins", "ROUGE-L wins"]
    assert first_cells[2:] == names
    assert ["reward", "75.0", "\N{EN DASH}", "\N{EN DASH}"] in lines
    found = "2.00 [-10.71, 14.71]"  # 2 +- 12.706 * 1.4142 / sqrt(2)
    assert ["sft", "\N{EN DASH}", found, "\N{EN DASH}"] in lines
    assert "`make results PARTS=demo`, 12 minutes, 2026-01-01, commit 0123456789, a proc" in text
    assert "(../assets/results/demo)" in text
    assert "Record" not in tables.filled(PAGE, is_in_docs=False)  # README has the table alone
    assert tables.filled(text) == text
    assert tables.filled(text.replace("14.71", "14.72")) == text
    assert text.startswith("# Page\n\nBefore.\n")
    assert text.endswith("\n\nAfter.\n")
    file = recorded / "demo" / "seed_1" / "evaluation" / "results.json"
    file.write_text(file.read_text().replace("3.0", "3.1"))
    assert tables.filled(text) != text


def test_a_page_names_a_record_once_and_every_part_has_a_line(recorded: Path):
    assert tables.filled(PAGE + PAGE).count("*[Record]") == 1
    text = tables.filled("<!-- records -->\n<!-- /records -->\n")
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("| ")}
    assert lines.keys() >= make.PARTS.keys()
    assert "0123456789" in lines["demo"]


def test_every_run_of_a_record_is_of_its_commit():
    for name in make.PARTS:
        for file in (make.RECORDS / name).glob("*.json"):
            commits = json.loads(file.read_text()).get("git_commits")
            assert commits in (None, [make.read_record(name)["git_commit"]]), file


def test_in_the_place_of_a_table_without_a_record_is_its_command(recorded: Path):
    text = tables.filled(PAGE.replace("demo.mean", "kills"))
    assert "<!-- kills -->\n*Not recorded: `make results PARTS=kills`.*\n<!-- /kills -->" in text
    assert "old" not in text
    with pytest.raises(KeyError):
        tables.filled(PAGE.replace("demo.mean", "demo.unknown"))
