"""Claim: intervals over seeds are Student's, as scipy has them; those of a family hold together.

About `experiments.runs.outcomes` and `experiments.runs.sweep`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.markers import CARETLEFT, CARETRIGHT

from common.evaluation.accuracy import Interval
from common.evaluation.results import GenerationSummary, System
from experiments.runs import replication
from experiments.runs.outcomes import judges, outcome_of, over_seeds, seeds_interval
from experiments.runs.sweep import effects
from experiments.runs.sweep.effects import Effect
from experiments.runs.sweep.sweep_file import Variant


def test_a_judge_is_known_by_its_name_whatever_it_gave():
    half = Interval(0.5, None, None)
    rewards = dict.fromkeys(("gold", "model", "other model", "style", "check"), half)
    rates = {"check": {"pass@1": half, "maj@4": half}}
    generations = GenerationSummary(8.0, half, 1.0, half, None, 1.0, rewards, rates)
    policy = System("sft", "policy", "", generations=generations, gold_reward=half, reward=half)
    systems = {"a": System("model", "reward_model", ""), "b": policy}
    names = ("other model", "style", "check/pass@1", "check/maj@4")
    assert judges(systems) == [f"judged/{name}" for name in names]
    named = replace(generations, rewards={"my/reward.py:style": half})
    systems = {"run": replace(policy, generations=named)}
    assert outcome_of("judged/style", Path("run"), systems) == 0.5
    assert outcome_of("judged/check/maj@4", Path("run"), systems) == 50
    assert outcome_of("judged/style", Path("other run"), systems) is None


def test_a_family_of_intervals_holds_together():
    """10 effects of size 0 with a common base, 8 seeds: in 95 of 100 cases none is significant."""
    generator = np.random.default_rng(2)
    variant, wrong = Variant("detail", "choice", "stage"), {0: 0, 10: 0}
    for _ in range(500):
        base, *lines = generator.normal(size=(11, 8)).tolist()
        for family in wrong:
            effects = [Effect(variant, "outcome", values, base, family) for values in lines]
            wrong[family] += any(effect.together.excludes_zero for effect in effects)
    assert wrong[10] / 500 < 0.05 + 4 * (0.05 * 0.95 / 500) ** 0.5
    assert wrong[0] / 500 > 0.15, "each interval alone does not"


@pytest.mark.parametrize(
    ("family", "values", "stars", "verdict"),
    [
        (0, [1.0, 1.1, 0.9, 1.0], " *", ""),  # secondary
        (5, [1.0, 1.1, 0.9, 1.0], " **", "yes"),
        (5, [1.0, 1.1, 0.1, 1.0], " *", "no larger than 2.17"),
        (5, [-1.0, -1.1, -0.1, -1.0], " *", "no larger than 2.17"),
        (5, [1.0, -1.1, 0.1, 1.0], "", "no larger than 3.16"),
        (5, [0.5], "", ""),
    ],
)
def test_what_is_said_of_an_effect(family, values, stars, verdict):
    """By hand: with 3 degrees the quantiles are 3.182 and, of a family of 5, 5.841."""
    effect = Effect(Variant("detail", "choice", "stage"), "", values, [0.0] * len(values), family)
    assert effect.verdict == verdict
    assert effect.cell.endswith(stars or ("]" if len(values) > 1 else "0"))


def test_an_interval_of_shares_never_leaves_0_to_100():
    """Student's of 86.5, 88.5 and 97.9 is [75.8, 106.1]: the seeds are shown in its place."""
    shares, by_seed = [86.5, 88.5, 97.9], "(86.50, 88.50, 97.90)"
    assert seeds_interval(shares, is_share=False) == "[75.85, 106.09]"
    measured = {("sft", "stop_rate"): dict(enumerate(shares))}
    assert replication.comparison([], measured).rows[0][3] == by_seed
    assert seeds_interval([50.0, 51.0, 52.0], is_share=True) == "[48.52, 53.48]"
    assert seeds_interval([50.0], is_share=True) == ""


def test_one_seed_has_no_interval():
    alone = over_seeds([0.4])
    assert (alone.mean, alone.sd, alone.low, alone.high, alone.n) == (0.4, None, None, None, 1)
    assert not alone.excludes_zero
    with pytest.raises(RuntimeError, match="not finite"):
        over_seeds([0.4, float("nan")])


@pytest.mark.parametrize(
    ("differences", "heads"),
    [
        ([0.0, 0.2], {CARETLEFT, CARETRIGHT}),  # of two seeds the interval is far wider than both
        ([1.0, 1.01, 1.02], set()),
        ([1.0, 1.2], {CARETRIGHT}),
        ([0.5], set()),  # of one seed there is none
    ],
)
def test_an_interval_that_leaves_the_axis_of_a_forest_plot_has_arrowheads(
    monkeypatch, differences, heads
):
    figures: list[Any] = []
    monkeypatch.setattr(effects, "save", lambda figure, path, dpi: figures.append(figure))
    zeros = [0.0] * len(differences)
    effect = Effect(Variant("beta", "1", "dpo"), "kl", differences, zeros, family=2)
    effects.draw({"dpo": {"kl": [effect]}}, Path("forest.png"))
    (figure,) = figures
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    marks = {line.get_marker(): line for line in axes.get_lines()}
    assert {mark for mark in marks if mark in (CARETLEFT, CARETRIGHT)} == heads
    for mark, place in ((CARETLEFT, low), (CARETRIGHT, high)):
        if mark in heads:
            assert marks[mark].get_xdata() == [place]
    assert ("arrowhead" in figure._supxlabel.get_text()) == bool(heads)
