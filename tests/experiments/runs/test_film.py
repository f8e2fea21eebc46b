"""Claim: the recipe `film` makes its rows of ratings, and measures what its policies wrote.

Targets: rows checked against the ratings that they were made of; rewards, KL and fluency of the
written texts computed again with plain transformers. About `experiments.runs.replicate` and
`experiments.runs.overoptimization`.
"""

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_recipes
import tiny
import torch
from stages_here import run_here
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from assets.recipes.film import baselines
from assets.recipes.film import measured as recorded
from common.config.parser import parse
from common.record.jsonl import read_jsonl
from experiments.runs import replicate, stages
from experiments.runs.overoptimization.curves import best_of_n, best_of_n_kl
from experiments.runs.stages import ROOT

pytestmark = pytest.mark.usefixtures("without_pictures", "few_resamples")

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
RATINGS = {
    f"sentence number {i} of a film is good": [i % 9 - 4, (i + 1) % 9 - 4] for i in range(80)
}


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def package() -> bytes:
    """The package of PyPI: an archive in an archive, with one text twice and double spaces."""
    texts = [*RATINGS, next(iter(RATINGS))]
    rated = [*RATINGS.values(), [0, 0]]
    lines = [f"{i}\t0\t{text.replace(' ', '  ')}\r\n" for i, text in enumerate(texts)]
    ratings = [f"{i}\t0\t1\t{values}\n" for i, values in enumerate(rated)]
    inner, outer = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        add(archive, "h/movieReviewSnippets_GroundTruth.txt", "".join(lines).encode())
        add(archive, "h/movieReviewSnippets_anonDataRatings.txt", "".join(ratings).encode())
    with tarfile.open(fileobj=outer, mode="w:gz") as archive:
        add(archive, "v/vaderSentiment/vader_lexicon.txt", b"good\t1.9\t0.5\t[]\n3\t-1\t0\t[]\n")
        add(archive, "v/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    return outer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The recipe's rows, and a stand-in for its model."""
    path = tmp_path_factory.mktemp("film")
    shutil.copytree(ROOT / "assets" / "recipes", path / "assets" / "recipes")
    (path / "v.tar.gz").write_bytes(package())
    script = ROOT / "assets" / "recipes" / "film" / "make_rows.py"
    subprocess.run([sys.executable, script, "--source", "v.tar.gz"], check=True, cwd=path)
    test_recipes.save_model(path / BASE)
    with tiny.working_directory(path):
        yield path


def rows(name: str) -> list[dict[str, Any]]:
    return read_jsonl(Path("data/film", f"{name}.jsonl"))


def test_rows_are_votes_on_sentences_of_one_split(folder):
    seen = {}
    for split in ("train", "validation", "test"):
        sentences = {row["prompt"] + row["completion"] for row in rows(f"sft/{split}")}
        seen[split] = {text.removeprefix("Film review: ") for text in sentences}
        names = ("proxy", "gold") if split == "train" else ("proxy", "means")
        for row in [row for name in names for row in rows(f"{name}/{split}")]:
            chosen, rejected = (row[name].strip() for name in ("chosen", "rejected"))
            assert {chosen, rejected} <= seen[split]
    assert set.union(*seen.values()) == RATINGS.keys()
    assert sum(map(len, seen.values())) == len(RATINGS)
    for row in rows("proxy/train"):
        high, low = (RATINGS[row[name].strip()] for name in ("chosen", "rejected"))
        others = (row["chosen_mean"], row["rejected_mean"])  # of two ratings the other one
        votes = {(a - b, (sum(high) - a, sum(low) - b)) for a in high for b in low}
        assert row["margin"] > 0
        assert (row["margin"], others) in votes
    halves = [
        {row[name] for row in rows(f"{half}/train") for name in ("chosen", "rejected")}
        for half in ("proxy", "gold")
    ]
    assert halves[0].isdisjoint(halves[1])
    matched = [row[name] for row in rows("means/test") for name in ("chosen", "rejected")]
    assert len(set(matched)) == len(matched)
    for row in rows("means/test"):
        means = [np.mean(RATINGS[row[name].strip()]) for name in ("chosen", "rejected")]
        assert means == [row["chosen_mean"], row["rejected_mean"]]
        assert means[0] > means[1]


def test_baselines_score_the_test_rows(folder):
    baselines.main("v.tar.gz", "baselines")
    results = json.loads(Path("baselines/scores.json").read_text())
    train = rows("sft/train")
    texts = [(row["prompt"] + row["completion"]).removeprefix("Film review: ") for row in train]
    pairs = rows("means/test")
    for kind, name in (("votes", "proxy"), ("means", "means")):
        expected = [[row["chosen_mean"], row["rejected_mean"]] for row in rows(f"{name}/test")]
        assert results[kind]["other people"] == expected
        assert results[kind]["lexicon"] == [[1.9, 1.9]] * len(expected)
    # Every term of the training sentences, by the normal equations
    counts = [Counter(baselines.terms(text)) for text in texts]
    shared_terms = [t for t in set().union(*counts) if sum(t in counted for counted in counts) > 1]
    seen = np.array([sum(t in counted for counted in counts) for t in shared_terms])
    idf = np.log((1 + len(texts)) / (1 + seen)) + 1

    def features(text: str) -> np.ndarray:
        counted = Counter(baselines.terms(text))
        row = np.array([counted[term] for term in shared_terms]) * idf
        return row / np.linalg.norm(row)

    x = np.stack([features(text) for text in texts])
    y = np.array([row["mean_rating"] for row in train])
    weights = np.linalg.solve(x.T @ x + np.eye(len(shared_terms)), x.T @ (y - y.mean()))
    for row, scores in zip(pairs, results["means"]["ridge"], strict=True):
        for side, score in zip(("chosen", "rejected"), scores, strict=True):
            assert score == pytest.approx(y.mean() + features(row[side]) @ weights, abs=1e-5)


def test_what_policies_wrote_is_measured_as_plain_transformers_measures_it(folder, monkeypatch):
    monkeypatch.setattr(stages, "run", run_here)
    for recipe in Path("assets/recipes/film/frontier").iterdir():
        text = recipe.read_text().replace("batch_size: 16", "batch_size: 2")
        text = re.sub(r"max_steps: \d+", "max_steps: 2", text)
        recipe.write_text(text.replace("save_steps: 10", "save_steps: 1"))
    short = ["max_steps=2", "batch_size=2", "num_train_rows=12", "num_sft_rows=4", "eval_steps=0"]
    short += ["frontier.grpo_variants=[beta=0.1, beta=0.1 num_candidates=9]"]
    short += ["frontier.num_prompts=3", "frontier.num_train_prompts=4", "frontier.best_of=[1, 4]"]
    flags = ["--recipe", "film", "--seeds", "3", "--overrides", *short]
    replicate.main(parse(replicate.ReplicateConfig, flags))
    recorded.keep_texts(Path("output/replicate/film"), Path("kept"))
    with torch.no_grad():
        check_measured(Path("output/replicate/film/seed_3"))


def check_measured(seed: Path) -> None:
    root = Path("kept/seed_3/frontier/seed_3/measured")
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.json")}
    measured = {name.removesuffix(".json"): json.loads(p.read_text()) for name, p in files.items()}
    last = {"rejection/16", "dpo/0.03", "grpo beta=0.1 num_candidates=9/2"}
    assert set(measured) >= {"pool/0", *last}
    assert len(measured) == 1 + 1 + 4 + 2 * 2
    tokenizer = AutoTokenizer.from_pretrained(seed / "sft/model")
    judges = {
        name: AutoModelForSequenceClassification.from_pretrained(seed / run / "model")
        for name, run in (("proxy", "reward"), ("gold", "reward-gold"))
    }
    policies = {
        "base": AutoModelForCausalLM.from_pretrained(BASE),
        "ref": AutoModelForCausalLM.from_pretrained(seed / "sft/model"),
    }
    prompts = [row["prompt"] for row in rows("sft/test")]
    values = measured["dpo/0.03"]
    assert values["prompts"] == prompts[:3]
    policies["pi"] = AutoModelForCausalLM.from_pretrained(seed / "frontier/seed_3/dpo_0.03/model")
    num_checked = 0
    for n, texts in enumerate(values["texts"]):
        for k, text in enumerate(texts):
            prompt = tokenizer(prompts[n])["input_ids"]
            completion = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            if len(completion) != values["lengths"][n][k] or values["proxy"][n][k] == -1:
                continue  # it did not stop, or its text has other tokens
            ids = torch.tensor([[*prompt, *completion]])
            for name, judge in judges.items():
                assert values[name][n][k] == pytest.approx(judge(ids).logits.item(), abs=1e-4)
            logps = {
                name: tiny.plain_logps(lm, prompt, completion).sum().item()
                for name, lm in policies.items()
            }
            difference = logps["pi"] - logps["ref"]
            assert values["log_ratio"][n][k] == pytest.approx(difference, abs=1e-3)
            assert values["fluency"][n][k] == pytest.approx(
                logps["base"] / len(completion), abs=1e-4
            )
            num_checked += 1
    assert num_checked >= 2
    results = json.loads((seed / "frontier/results.json").read_text())
    points = {p["setting"]: p for p in results["points"] if p["method"] == "best_of_n"}
    pool = measured["pool/0"]
    expected = best_of_n(pool["proxy"], pool["gold"], [4])[0].mean()
    assert points[4]["gold"]["mean"] == pytest.approx(expected)
    assert points[4]["kl"]["mean"] == pytest.approx(best_of_n_kl(4))
