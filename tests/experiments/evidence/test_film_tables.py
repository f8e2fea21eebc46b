"""Claim: the tables of the recipe `film` say what its records hold, with intervals that cover.

Targets: Student's intervals where one factor varies, coverage by simulation, and records written
by hand. About `assets/recipes/film/tables.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from assets.recipes.film import measured as measured_completions
from assets.recipes.film import tables as film
from common.config.recipes import read_recipe
from experiments.evidence.records import studies
from experiments.runs.power import detectable

SEEDS = 3
PROMPTS = 8


def test_numbers_of_votes_and_sizes_are_those_of_the_recipe():
    recipes = studies.ROOT / "assets" / "recipes" / "film"
    for name, votes in {**film.VOTES, film.GOLD: 3000}.items():
        recipe = read_recipe(str(recipes / f"{name}.yaml"), typed=True)
        assert recipe["num_train_rows"] == votes
        assert film.NAMES[name].startswith(f"{votes:,} votes")
    assert tuple(read_recipe(str(recipes / "frontier.yaml"), typed=True)["best_of"]) == film.SIZES


@pytest.mark.parametrize("axis", [0, 1])
def test_interval_is_students_where_one_factor_varies(axis):
    values = np.random.default_rng(0).normal(size=5)
    table = np.repeat(values[:, None], 7, axis=1) if axis == 0 else np.repeat(values[None], 7, 0)
    half = stats.t.ppf(0.975, 4) * values.std(ddof=1) / np.sqrt(5)
    ends = film.Crossed(table).interval()
    assert ends["mean"] == pytest.approx(values.mean())
    assert (ends["low"], ends["high"]) == pytest.approx(
        (values.mean() - half, values.mean() + half)
    )
    alone = film.Crossed(values[None]).interval()
    assert alone["high"] == pytest.approx(values.mean() + half)
    assert film.Crossed(table).detectable() == f"{detectable(values.std(ddof=1) / 5**0.5, 4):.2f}"
    five = film.Crossed(table).interval(family=5)
    assert five["high"] - ends["mean"] == pytest.approx(
        half * stats.t.ppf(1 - 0.025 / 5, 4) / stats.t.ppf(0.975, 4)
    )


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.1, 1.0, 1.0), (1.0, 0.1, 1.0)])
def test_interval_covers_as_often_as_it_says(scales):
    generator, covered = np.random.default_rng(1), []
    for _ in range(1000):
        seeds, rows, both = (
            scale * generator.normal(size=s)
            for scale, s in zip(scales, [(3, 1), (1, 40), (3, 40)], strict=True)
        )
        ends = film.Crossed(seeds + rows + both).interval()
        covered.append(ends["low"] < 0 < ends["high"])
    assert np.mean(covered) > 0.93


def test_gain_at_a_kl_lies_between_its_points():
    def point(kl: float, gain: float) -> dict[str, object]:
        return {"kl": np.array([kl - 0.5, kl + 0.5]), "gold_gain": np.array([gain, -gain])}

    track = [point(9, 4), point(1, 2)]  # in any order
    for kl, gain in ((0.25, 1.0), (1.0, 2.0), (4.0, 3.0), (9.0, 4.0)):
        np.testing.assert_allclose(film.gain_at(track, kl), [gain, -gain])
    assert film.gain_at(track, 9.1) is None


def test_distinct_words_and_pairs():
    few = ["a b a b", "a c"]
    assert measured_completions.distinct(few, 1) == 3 / 6
    assert measured_completions.distinct(few, 2) == 3 / 4
    long = "a b c d e f g h"
    assert measured_completions.distinct([long, f"{long} only the first eight count"], 1) == 8 / 16


def test_of_measured_completions_values_and_some_texts_are_kept():
    values = {"gold": [[1.0, 2.0], [3.0, 0.1]], "proxy": [[0.0, 1.0], [1.0, 2.0]]}
    record = values | {"prompts": ["p", "q"], "texts": [["a a", "a b"], ["b c", "b b"]]}
    shares = {"first": [3 / 4, 2 / 2], "best": [2 / 4, 2 / 2]}
    for with_texts, texts in ((True, {}), (False, {"prompts": [], "texts": []})):
        kept = measured_completions.kept(record, with_texts=with_texts)
        assert kept == record | texts | {"distinct": shares}


def clear_caches() -> None:
    for function in (film.scores, film.measured, film.tracks, film.gains):
        function.cache_clear()


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Three seeds: the gold gain of DPO is the root of its KL, that of GRPO twice as much."""
    monkeypatch.setattr(studies, "RECORDS", tmp_path)
    clear_caches()
    for seed in range(SEEDS):
        save_scores(tmp_path / f"film-{seed}" / f"seed_{seed}", seed)
        save_policies(measured(tmp_path, seed), seed)
    baselines = {"lexicon": [[1, 0], [0, 0]], "ridge": [[1, 0], [0, 1]]}
    rows = baselines | {"other people": [[2, -1], [1, 0]]}
    (tmp_path / "film-baselines").mkdir()
    text = json.dumps({"votes": rows, "means": rows})
    (tmp_path / "film-baselines" / "scores.json").write_text(text)
    yield tmp_path
    clear_caches()  # the pages have other records


def measured(records: Path, seed: int) -> Path:
    return records / f"film-{seed}" / f"seed_{seed}" / "frontier" / f"seed_{seed}" / "measured"


def save_scores(folder: Path, seed: int) -> None:
    """Both pairs right from 1,000 votes on, before that the second one wrong."""
    for name in film.EVALUATIONS.values():
        path = folder / name / "scores.jsonl"
        path.parent.mkdir(parents=True)
        first, second = [2 + seed, -1], [1, 0]
        scores = {name: [first, second] for name in film.NAMES}
        scores |= {name: [first, second[::-1]] for name in ("reward-250", "reward-500")}
        lines = [{"row": i, "scores": {n: s[i] for n, s in scores.items()}} for i in range(2)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def save_policies(folder: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    start = generator.normal(size=PROMPTS)
    proxy = generator.normal(size=(PROMPTS, 64))
    write(folder / "pool/0.json", 0 * proxy, np.repeat(start[:, None], 64, 1), proxy)
    for name, factor in (("dpo", 1), ("grpo beta=0.1", 2), ("grpo beta=0.1 num_candidates=8", 2)):
        for setting, kl in ((10, 1.0), (20, 4.0 if name != "dpo" else 0.25)):
            gold = start + factor * kl**0.5
            shape = np.ones((PROMPTS, 2))
            write(folder / name / f"{setting}.json", kl * shape, gold[:, None] * shape, shape)


def write(path: Path, kl: np.ndarray, gold: np.ndarray, proxy: np.ndarray) -> None:
    number = proxy.shape[1]
    prompts = [f"Film review: number {i}" for i in range(PROMPTS)]
    completions = [[f" {path.parent.name} {k}" for k in range(number)] for _ in prompts]
    values = {"gold": gold, "proxy": proxy, "log_ratio": kl, "lengths": 0 * gold + 5}
    lists = {name: value.tolist() for name, value in values.items()}
    lists |= {"fluency": lists["log_ratio"], "prompts": prompts, "texts": completions}
    record = measured_completions.kept(lists, with_texts="film-0" in path.parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def cells(table: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in studies.cells(table)}


def test_reward_models_are_compared_on_the_same_pairs(records):
    lines = cells(film.reward_models())
    assert lines["250 votes"][0].startswith("50.0 [")
    assert lines["3,000 votes, other half: gold"][1] == "100.0 [100.0, 100.0]"
    assert lines["lexicon"][1].startswith("75.0 [")
    assert lines["other people"][1:] == ["–", "–"]
    scores = np.array([[2 + s, -1, 1, 0] for s in range(SEEDS)])
    correlation = np.mean([np.corrcoef(of_seed, [2, -1, 1, 0])[0, 1] for of_seed in scores])
    assert lines["ridge"][2] == f"{np.corrcoef([1, 0, 0, 1], [2, -1, 1, 0])[0, 1]:.2f}"
    assert lines["1,000 votes"][2].startswith(f"{correlation:.2f} [")
    # 0.5, 0.5, 1, 1 at 0, 1, 2, 3 doublings
    assert film.growth().startswith("Twice the votes add 20.0 [")


def test_methods_are_compared_at_the_same_kl(records):
    lines = cells(film.at_kls())
    assert lines["GRPO"][0].startswith("2.00 [")
    assert lines["GRPO"][1].startswith("2.83 [")
    assert len(lines["GRPO"]) == 2  # nothing reaches 5 or 10 nats
    assert lines["DPO"][0].startswith("1.00 [")
    assert lines["DPO"][1] == "–"
    assert lines["SFT on the best of 16"] == ["–", "–"]  # it was not run
    between = cells(film.differences())
    assert between["GRPO with rejection - GRPO"][:2] == ["+0.00 [+0.00, +0.00]"] * 2
    assert {*between["GRPO with rejection - GRPO"][2:]} == {"–"}  # nothing varies
    assert between["GRPO - best of n"][1].startswith("+2.83 [")
    assert between["GRPO - best of n"][1].endswith(r"\*\*")
    assert between["GRPO - DPO"][0].startswith("+1.00 [")
    assert between["GRPO - DPO"][1] == "–"


def test_with_penalty_not_stopping_costs_gold_too(records):
    halves, expected = np.ones((PROMPTS, 2)), []
    for seed in range(SEEDS):
        start = np.random.default_rng(seed).normal(size=PROMPTS)
        gold, proxy = start[:, None] + halves * [1, 100], halves * [1, film.PENALTY]
        write(measured(records, seed) / "dpo/10.json", halves, gold, proxy)
        expected.append(2 - np.mean((start + 1 + film.PENALTY) / 2 - start))
    cell = cells(film.differences(with_penalty=True))["GRPO - DPO"][0]
    assert cell.startswith(f"{np.mean(expected):+.2f} [")
    assert cells(film.differences())["GRPO - DPO"][0].startswith("-48.50 [")


def test_completions_that_did_not_stop_are_counted_with_their_gold_reward(records):
    for seed in range(SEEDS):
        ones = np.ones((PROMPTS, 2))
        write(
            measured(records, seed) / "rejection/16.json",
            ones,
            ones * [5, seed],
            ones * [1, film.PENALTY],
        )
    every = PROMPTS * (64 + 6 * 2 + 2)
    share = f"{100 * PROMPTS / every:.0f}% of completions"
    lines = [f"seed {seed}: {share}, {seed}.00" for seed in range(SEEDS)]
    assert film.unfinished().endswith(f"{'; '.join(lines)}.")


def test_texts_and_samples_are_those_of_the_farthest_policies(records, tmp_path, monkeypatch):
    lines = cells(film.texts())
    assert lines["DPO, beta 10"][0] == "1.00"  # the smallest beta is the farthest
    assert lines["GRPO, beta 0.1, step 20"][0] == "4.00"
    assert lines["best of 64"][0] == "–"
    assert lines["SFT"][2] == "5.0"
    rows = studies.cells(film.samples())
    assert len(rows) == 1 + 6 * 5
    assert rows[1] == ["Film review: number 0", "SFT", "pool 0"]
    best = np.random.default_rng(0)
    best.normal(size=PROMPTS)
    chosen = best.normal(size=(PROMPTS, 64)).argmax(1)[0]
    assert rows[2] == ["", "best of 64", f"pool {chosen}"]
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    assert film.draw().read_bytes().startswith(b"\x89PNG")


def test_the_figure_names_policies_in_legends_and_not_where_they_lie(records, monkeypatch):
    """Labels next to points collide where policies are alike."""
    figures: list[Any] = []
    monkeypatch.setattr(film, "save", lambda figure, path, dpi: figures.append(figure) or path)
    film.draw()
    ((over_kl, over_proxy),) = (figure.axes for figure in figures)
    assert [*over_kl.texts, *over_proxy.texts] == []
    betas = over_kl.get_legend()
    marks = {
        text.get_text(): line.get_marker()
        for text, line in zip(betas.get_texts(), betas.get_lines(), strict=True)
    }
    assert marks == film.MARKERS
    assert len(set(marks.values())) == len(marks)
    drawn = {line.get_marker() for line in over_kl.get_lines() if line.get_label() == "GRPO"}
    assert drawn <= set(marks.values())
    methods = [text.get_text() for text in over_proxy.get_legend().get_texts()]
    assert set(methods) - {"SFT"} <= set(film.METHODS)
