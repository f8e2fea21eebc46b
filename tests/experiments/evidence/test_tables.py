"""Claim: a table of README or `docs/` says what its record says, and pictures are drawn from it.

The pages are compared with what the records of this repository give. One table is worked out by
hand. The table of claims of papers has for each what its rule makes of the records. About
`experiments.evidence.tables` and `experiments.evidence.records`.
"""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from assets.recipes.papers import tables as papers
from assets.recipes.papers.tables import CLAIMS, Claim, at_equal_kl, line, misfit, turn
from common.evaluation.accuracy import Interval, PreferenceAccuracy
from common.evaluation.records import BASELINES
from common.evaluation.results import (
    ComparedScore,
    Comparison,
    GenerationSummary,
    Results,
    System,
    write_results,
)
from experiments.evidence import tables
from experiments.evidence.records import replications, studies
from experiments.runs.sweep.sweep_file import Variant, read_sweep

PAGE = "# Page\n\nBefore.\n\n<!-- demo.mean -->\nold\n<!-- /demo.mean -->\n\nAfter.\n"
RECORD = {
    "git_commit": "0123456789abcdef",
    "date": "2026-01-01",
    "minutes": 12.3,
    "cpu": "a processor",
    "cores": 2,
    "packages": {"torch": "2.13.0"},
    **{"commands": [], "trajectories": {}, "settings": "", "starts": 1, "python": "3.11"},
}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page: Path):
    """After a change of a record: `python -m experiments.evidence.tables`."""
    text = page.read_text()
    assert tables.filled(text, is_in_docs=page.parent != studies.ROOT) == text
    places = [name for _, name, _, _ in tables.PLACE.findall(text)]
    assert len(places) == text.count("<!-- /")


@pytest.mark.parametrize(
    "part", ["demo", "bench-tiny", "one-sentence", "ablations", "overoptimization"]
)
def test_a_picture_is_as_narrow_as_a_phone_needs(part, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    picture = studies.functions("FIGURES")[part]()
    assert isinstance(picture, Path)
    assert picture.parent == tmp_path / "assets"
    with Image.open(picture) as image:
        assert (image.format, image.width < 700) == ("PNG", True)


def test_accuracy_is_drawn_with_its_interval_over_prompts(monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(replications, "draw_accuracy", lambda _, results, __: drawn.append(results))
    monkeypatch.setattr(replications, "draw_reward", lambda *_: None)
    monkeypatch.setattr(replications, "save", lambda *_: Path())
    overall = PreferenceAccuracy(0.6, 0.58, 0.62, 1_226, 0)
    with_ends = replace(overall, prompt_low=0.5, prompt_high=0.7)
    compared = [
        ComparedScore(f"dpo {score}", replace(with_ends, accuracy=accuracy))
        for score, accuracy in (("logp", 0.4), ("implicit_reward", 0.6), ("mean_logp", 0.5))
    ]
    systems = [System("dpo", "policy", "dpo/model", accuracy=overall)]
    comparison = Comparison(1_226, 1_226, compared, [])
    results = Results(num_pairs=1_226, systems=systems, comparison=comparison)
    monkeypatch.setattr(replications, "evaluations", lambda part: {"0": results})
    replications.draw("demo")
    accuracy = drawn[0].systems[0].accuracy
    assert (accuracy.low, accuracy.accuracy, accuracy.high) == (0.5, 0.6, 0.7)


def accuracy_of(value: float) -> PreferenceAccuracy:
    return PreferenceAccuracy(value, 0.0, 1.0, 8, 0)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of one part with two seeds, in place of those there are."""
    monkeypatch.setattr(studies, "RECORDS", tmp_path)
    for seed, kl in enumerate((1.0, 3.0)):
        folder = tmp_path / "demo" / f"seed_{seed}" / "evaluation"
        folder.mkdir(parents=True)
        nothing = Interval(0.0, None, None)
        written = GenerationSummary(7.0, nothing, 0.5, nothing, None, 1.0)
        policy = System("sft", "policy", "sft/model")
        policy.generations = replace(written, kl=Interval(kl, None, None))
        judge = System("reward", "reward_model", "reward/model", accuracy=accuracy_of(0.75))
        judge.minutes = 1.0  # of its run; nobody here trained the other
        baselines = zip(BASELINES, (0.5, 0.5, 0.625, 0.5), strict=True)
        compared = [ComparedScore(name, accuracy_of(value)) for name, value in baselines]
        results = Results(systems=[judge, policy], reference_completions=written)
        results.comparison = Comparison(8, 8, compared, [])
        write_results(results, folder)
    (tmp_path / "demo" / "record.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_a_changed_digit_of_the_page_or_of_the_record_is_found(recorded: Path):
    text = tables.filled(PAGE)
    lines = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()]
    assert ["mean of 2 seeds [95%]", "accuracy %", "KL", "length", "stop %"] in lines
    assert ["reference completion", "\N{EN DASH}", "\N{EN DASH}", "7.0", "50.0"] in lines
    assert ["ROUGE-L wins", "62.5", *3 * ["\N{EN DASH}"]] in lines
    first_cells = [line[0] for line in lines if len(line) == 5]
    names = ["reference completion", "sft", "reward", "longer wins", "ROUGE-L wins"]
    assert first_cells[2:] == names
    assert ["reward", "75.0", *3 * ["\N{EN DASH}"]] in lines
    interval = "2.00 [-10.71, 14.71]"  # 2 +- 12.706 * 1.4142 / sqrt(2)
    assert ["sft", "\N{EN DASH}", interval, "7.0", "50.0"] in lines
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
    assert lines.keys() >= studies.recordings().keys()
    assert "0123456789" in lines["demo"]


def test_every_run_of_a_record_is_of_its_commit():
    for name in studies.recordings():
        record = studies.read_record(name)
        for file in (studies.RECORDS / name).glob("*.json"):
            commits = json.loads(file.read_text()).get("git_commits")
            assert commits in (None, [record and record.git_commit]), file


def test_in_the_place_of_a_table_without_a_record_is_its_command(recorded: Path):
    text = tables.filled(PAGE.replace("demo.mean", "kills"))
    assert "<!-- kills -->\n*Not recorded: `make results PARTS=kills`.*\n<!-- /kills -->" in text
    assert "old" not in text
    with pytest.raises(KeyError):
        tables.filled(PAGE.replace("demo.mean", "demo.unknown"))


# ---- the claims of papers ------------------------------------------------------------------------


def effect(choice: str, by_seed: list[float], outcome: str = "gold_reward") -> dict:
    variant = vars(Variant("d", choice, "grpo"))
    return recorded_effect(variant, outcome, by_seed, [1.0, 2.0, 3.0])


def recorded_effect(variant: dict, outcome: str, values: list[float], base: list[float]) -> dict:
    together = {"family": 1}
    values_of = {"by_seed": values, "base_by_seed": base, "together": together}
    return {**variant, "outcome": outcome, **values_of}


SWEEP = {
    "effects": [
        effect("up", [2.0, 3.1, 3.9]),  # 1.0, 1.1, 0.9: sd 0.1, 4.303 x 0.1 / sqrt(3) = 0.248
        effect("mixed", [2.0, 1.0, 3.3]),  # 1, -1, 0.3: mean 0.1, sd 1.0149, half width 2.521
        effect("up", [9.0, 9.0, 9.0], "length"),
    ]
}


@pytest.mark.parametrize(
    ("choice", "sign", "cell", "verdict"),
    [
        ("up", 1, "+1.00 [+0.75, +1.25] points, 3 seeds", "holds"),
        ("up", -1, "+1.00 [+0.75, +1.25] points, 3 seeds", "does not hold"),
        ("mixed", 1, "+0.10 [-2.42, +2.62] points, 3 seeds", "not significant; at most +2.62"),
        ("mixed", -1, "+0.10 [-2.42, +2.62] points, 3 seeds", "not significant; at most -2.42"),
        ("lost", 1, "\N{EN DASH}", "not measured"),
    ],
)
def test_a_verdict_follows_from_the_interval_and_the_claimed_sign(choice, sign, cell, verdict):
    found = partial(line, "grpo", "gold_reward", ("d", choice))
    claim = Claim("P", "it helps", "here", "points", sign, "", found)
    assert claim.row(SWEEP) == ["it helps (P)", "here", cell, verdict]


def test_one_line_may_stand_beside_another():
    found = line("grpo", "gold_reward", ("d", "up"), SWEEP, baseline=("d", "mixed"))
    assert found == pytest.approx([0.0, 2.1, 0.6])
    with pytest.raises(KeyError):
        line("dpo", "gold_reward", ("d", "up"), SWEEP)


def point(method: str, kl: float, gain: float, seed: int = 0, setting: float = 0) -> dict:
    own = {"method": method, "seed": seed, "setting": setting, "distance": math.sqrt(kl)}
    return own | {
        "kl": {"mean": kl},
        "gold_gain": {"mean": gain},
        "proxy_gain": {"mean": -2 * gain},
    }


def record_of(points: list[dict]) -> dict:
    return {"points": points, "seeds": list({own["seed"] for own in points})}


def test_at_equal_kl_the_other_s_gain_is_interpolated():
    # GRPO has 0.2 at 2, where DPO has 5 points more, and 0.05 at 0.5, where DPO has 3 less; DPO's
    # point at 4 is farther than GRPO's last.
    grpo = [point("grpo", 3.0, 0.3), point("grpo", 1.0, 0.1)]
    dpo = [point("dpo", kl, gain, 0, kl) for kl, gain in ((2.0, 0.25), (0.5, 0.02), (4.0, 0.9))]
    assert at_equal_kl("dpo", "grpo", record_of(grpo + dpo)) == [pytest.approx(1.0)]
    proxy = at_equal_kl("dpo", "grpo", record_of(grpo + dpo), gain="proxy_gain", scale=1)
    assert proxy == [pytest.approx(-0.02)]
    with pytest.raises(KeyError, match="within the reach"):
        at_equal_kl("dpo", "grpo", record_of([*grpo, dpo[2]]))


def test_every_seed_is_compared_at_the_same_settings():
    grpo = [point("grpo", 3.0, 0.3, seed) for seed in (0, 1)]
    dpo = [point("dpo", 1.0, 0.12, 0, 1), point("dpo", 2.0, 0.3, 0, 2)]
    dpo += [point("dpo", 2.0, 0.23, 1, 1), point("dpo", 5.0, 0.9, 1, 2)]
    assert at_equal_kl("dpo", "grpo", record_of(grpo + dpo)) == pytest.approx([2.0, 3.0])


def test_the_form_that_points_lie_on_fits_better():
    kls = (0.25, 1.0, 2.25, 4.0, 9.0)
    points = [point("grpo", kl, math.sqrt(kl) * (0.4 - 0.1 * math.sqrt(kl)), 3) for kl in kls]
    points += [point("grpo", kl, math.sqrt(kl) * (0.4 - 0.1 * math.log(kl) / 2), 5) for kl in kls]
    on_bon, on_rl = misfit("grpo", "bon", "rl", record_of(points))
    assert on_bon > 0.5
    assert on_rl < -0.5


def test_the_best_setting_is_that_of_the_other_seeds():
    gains = {0: (0.1, 0.5, 0.4), 1: (0.6, 0.2, 0.3), 2: (0.1, 0.6, 0.0)}
    of_all = [(seed, *one) for seed, own in gains.items() for one in enumerate(own)]
    points = [point("grpo", at, gain, seed, at) for seed, at, gain in of_all]
    # Others' means: of seed 0 (0.35, 0.4, 0.15), of 1 (0.1, 0.55, 0.2), of 2 (0.35, 0.35, 0.35).
    assert turn("grpo", record_of(points)) == pytest.approx([-10.0, 10.0, -10.0])


def test_without_records_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "RECORDS", tmp_path)
    rows = papers.table().splitlines()
    assert len(rows) == 2 + len(CLAIMS)
    assert all(row.endswith("| not measured |") for row in rows[2:])


def test_the_shipped_sweep_runs_what_the_claims_are_about(monkeypatch):
    monkeypatch.chdir(studies.ROOT)
    sweep = read_sweep("assets/recipes/ablations/demo.yaml")
    of_all = [
        recorded_effect(vars(own), outcome, [1.0], [0.0])
        for own in sweep.variants
        for outcome in sweep.base[own.stage].outcomes
    ]
    told = [claim.row({"effects": of_all}) for claim in CLAIMS if claim.file == papers.SWEEP]
    assert len(told) >= 9
    assert {row[-1] for row in told} == {"not significant: one seed"}
