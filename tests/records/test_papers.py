"""Claim: the table beside the papers says of each claim what its rule says of the records."""

import math
from functools import partial

import pytest

from experiments.records import make, papers
from experiments.records.papers import CLAIMS, Claim, at_equal_kl, line, misfit, turn
from experiments.sweep.sweep_file import read_sweep


def effect(choice: str, by_seed: list[float], outcome: str = "gold_reward") -> dict:
    key = {"stage": "grpo", "outcome": outcome, "detail": "d", "choice": choice}
    return key | {"by_seed": by_seed, "base_by_seed": [1.0, 2.0, 3.0]}


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


def record(points: list[dict]) -> dict:
    return {"points": points, "seeds": list({own["seed"] for own in points})}


def test_at_equal_kl_the_other_s_gain_is_interpolated():
    # GRPO has 0.2 at 2, where DPO has 5 points more, and 0.05 at 0.5, where DPO has 3 less; DPO's
    # point at 4 is farther than GRPO's last.
    grpo = [point("grpo", 3.0, 0.3), point("grpo", 1.0, 0.1)]
    dpo = [point("dpo", kl, gain, 0, kl) for kl, gain in ((2.0, 0.25), (0.5, 0.02), (4.0, 0.9))]
    assert at_equal_kl("dpo", "grpo", record(grpo + dpo)) == [pytest.approx(1.0)]
    proxy = at_equal_kl("dpo", "grpo", record(grpo + dpo), gain="proxy_gain", scale=1)
    assert proxy == [pytest.approx(-0.02)]
    with pytest.raises(KeyError, match="within the reach"):
        at_equal_kl("dpo", "grpo", record([*grpo, dpo[2]]))


def test_every_seed_is_compared_at_the_same_settings():
    grpo = [point("grpo", 3.0, 0.3, seed) for seed in (0, 1)]
    dpo = [point("dpo", 1.0, 0.12, 0, 1), point("dpo", 2.0, 0.3, 0, 2)]
    dpo += [point("dpo", 2.0, 0.23, 1, 1), point("dpo", 5.0, 0.9, 1, 2)]
    assert at_equal_kl("dpo", "grpo", record(grpo + dpo)) == pytest.approx([2.0, 3.0])


def test_the_form_that_points_lie_on_fits_better():
    kls = (0.25, 1.0, 2.25, 4.0, 9.0)
    points = [point("grpo", kl, math.sqrt(kl) * (0.4 - 0.1 * math.sqrt(kl)), 3) for kl in kls]
    points += [point("grpo", kl, math.sqrt(kl) * (0.4 - 0.1 * math.log(kl) / 2), 5) for kl in kls]
    on_bon, on_rl = misfit("grpo", "bon", "rl", record(points))
    assert on_bon > 0.5
    assert on_rl < -0.5


def test_the_best_setting_is_that_of_the_other_seeds():
    gains = {0: (0.1, 0.5, 0.4), 1: (0.6, 0.2, 0.3), 2: (0.1, 0.6, 0.0)}
    of_all = [(seed, *one) for seed, own in gains.items() for one in enumerate(own)]
    points = [point("grpo", at, gain, seed, at) for seed, at, gain in of_all]
    # Others' means: of seed 0 (0.35, 0.4, 0.15), of 1 (0.1, 0.55, 0.2), of 2 (0.35, 0.35, 0.35).
    assert turn("grpo", record(points)) == pytest.approx([-10.0, 10.0, -10.0])


def test_without_records_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "RECORDS", tmp_path)
    rows = papers.table().splitlines()
    assert len(rows) == 2 + len(CLAIMS)
    assert all(row.endswith("| not measured |") for row in rows[2:])


def test_the_shipped_sweep_runs_what_the_claims_are_about(monkeypatch):
    monkeypatch.chdir(make.ROOT)
    sweep = read_sweep("assets/recipes/ablations/demo.yaml")
    of_all = [
        {**vars(own), "outcome": outcome, "by_seed": [1.0], "base_by_seed": [0.0]}
        for own in sweep.variants
        for outcome in sweep.base[own.stage].outcomes
    ]
    told = [claim.row({"effects": of_all}) for claim in CLAIMS if claim.file == papers.SWEEP]
    assert len(told) >= 9
    assert {row[-1] for row in told} == {"not significant: one seed"}
