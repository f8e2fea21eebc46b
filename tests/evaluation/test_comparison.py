"""Claim: every system is compared on one fixed set of pairs, and `scores.jsonl` tells it all.

Scores are those of transformers on single texts, for reward models of any vocabulary and
policies in every reading; the numbers of `results.json` follow from `scores.jsonl` alone. About
`common.evaluation.summary`, `common.evaluation.records` and `common.evaluation.runs`.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from ranks import launch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import evaluate
from common import distributed
from common.config.dpo import DPOConfig
from common.config.evaluate import POLICY_SCORES, EvaluateConfig
from common.config.grpo import GRPOConfig
from common.config.reward import RewardConfig
from common.config.stages import SFTConfig
from common.errors import UserError
from common.evaluation import measure, records, runs, summary
from common.evaluation.records import BASELINES, PairScores
from common.evaluation.results import read_results
from common.model import load
from common.objectives.implicit_reward import ImplicitReward
from common.record.run_folder import MARKS_OF_TRAINING
from common.report import tables
from common.rewards.models import RewardModelFunction
from common.text import reading, synthetic
from common.text.example import Example

NUM_PAIRS = 30
LENGTHS = {"max_prompt_length": 128, "max_completion_length": 64}


def table_of(**systems: list[list[float]]) -> PairScores:
    """Pairs of one prompt each, with scores."""
    scores = {name: np.array(values, dtype=float) for name, values in systems.items()}
    pairs = [pair(row) for row in range(len(next(iter(scores.values()))))]
    return PairScores(pairs, scores)


def pair(row: int, **facts: Any) -> dict[str, Any]:
    usual = {"dataset": "d", "split": "s", "row": row, "prompt_sha256": f"{row}", "source": "tldr"}
    usual |= {"label_probability": None, "chosen_tokens": 10, "rejected_tokens": 10}
    return usual | facts


def test_readings_of_a_policy_by_hand():
    logps, ref_logps = torch.tensor([[-4.0, -6.0]]), torch.tensor([[-4.5, -4.5]])
    pairs = [Example(0, "p", [5], [[1, 2], [1, 2, 3]], {})]
    config: Any = SimpleNamespace(policy_scores=POLICY_SCORES)
    given = (pairs, ImplicitReward(), config)
    read = measure.policy_scores(logps, ref_logps, *given)
    assert {kind: scores.tolist() for kind, scores in read.items()} == {
        "implicit_reward": [[0.5, -1.5]],
        "logp_per_token": [[-2.0, -2.0]],
    }
    itself = measure.policy_scores(logps, None, *given)
    assert {kind: scores.tolist() for kind, scores in itself.items()} == {
        "logp": [[-4.0, -6.0]],
        "logp_per_token": [[-2.0, -2.0]],
    }


def test_a_system_with_a_score_that_is_not_finite_is_refused_at_once():
    table = PairScores([pair(0)])
    with pytest.raises(RuntimeError, match="1 of 2 values are not finite"):
        table.add({"rm": np.array([[1.0, math.nan]])})
    assert not table.scores


def test_baselines_by_hand():
    prompt = "TITLE: cats\n\nPOST: the old cat sat down\n\nTL;DR:"
    examples = [Example(row, prompt, [5], [[1, 2, 3], [1, 2]], {}) for row in (0, 7)]
    texts = [[" the cat sat", " cats"], [" no", " a down TL;DR"]]
    found = measure.baselines(examples, texts, seed=1)
    assert list(found) == list(BASELINES)
    longer, shorter, overlap, guess = found.values()
    assert longer.tolist() == [[3, 2], [3, 2]]
    assert shorter.tolist() == [[-3, -2], [-3, -2]]
    assert overlap == pytest.approx(np.array([[6 / 8, 0], [0, 2 / 9]]))  # the title is no post
    assert len(np.unique(guess)) == 4
    others = measure.baselines(examples[1:], texts[1:], seed=1)["random guess"]
    assert others.tolist() == guess[1:].tolist()  # of seed and row
    assert (measure.baselines(examples, texts, seed=2)["random guess"] != guess).all()


def test_odds_are_known_only_where_the_rows_say_so():
    columns = [{"label_probability": p} for p in (0.9, None)]
    pairs = [Example(i, "p", [1], [[2], [3]], columns[i]) for i in range(2)]
    described = records.describe_pairs(pairs, "data", "validation")
    assert [pair["label_probability"] for pair in described] == [0.9, None]
    assert summary.attainable_accuracy(described) is None
    assert summary.attainable_accuracy(described[:1]) == 0.9


def test_every_source_is_counted_by_itself_by_hand():
    table = table_of(a=[[1, 0], [1, 0], [0, 1], [0, 0]], b=[[0, 1], [1, 0], [1, 0], [1, 0]])
    for row, source in enumerate("xxyy"):
        table.pairs[row]["source"] = source
    found = summary.compare(table)
    a, _ = found.systems
    assert (a.accuracy.accuracy, a.accuracy.num_ties) == (2.5 / 4, 1)
    by_source = {part: value.accuracy for part, value in a.accuracy_by["source"].items()}
    assert by_source == {"x": 1.0, "y": 0.25}
    assert [value.num_pairs for value in a.accuracy_by["source"].values()] == [2, 2]
    assert set(a.accuracy_by) == {"source"}
    (difference,) = found.differences
    assert difference.difference == pytest.approx(2.5 / 4 - 3 / 4)
    assert (difference.num_first_better, difference.num_second_better) == (1, 2)


def test_pairs_of_a_prompt_are_drawn_together():
    """Twelve prompts of five pairs that are all right or all wrong, of two systems."""
    right = [[1.0, 0.0]] * 30 + [[0.0, 1.0]] * 30
    apart, together = (table_of(a=right, b=right[::-1]) for _ in range(2))
    for row, line in enumerate(together.pairs):
        line["prompt_sha256"] = str(row // 5)
    found = [summary.compare(table) for table in (apart, together)]
    narrow, wide = (each.systems[0].accuracy for each in found)
    assert (narrow.low, narrow.high) == (wide.low, wide.high)  # Wilson's do not know
    assert wide.prompt_high - wide.prompt_low > 1.8 * (narrow.prompt_high - narrow.prompt_low)
    assert found[1].num_prompts == 12
    (first,), (second,) = (each.differences for each in found)
    assert second.high - second.low > 1.8 * (first.high - first.low)
    assert first.p_value == second.p_value == 1


def test_pairs_of_one_prompt_show_no_difference():
    """Of one prompt every resample is the same: an interval of width 0 would claim certainty."""
    table = table_of(a=[[1.0, 0.0]] * 20, b=[[1.0, 0.0]] * 8 + [[0.0, 1.0]] * 12)
    for line in table.pairs:
        line["prompt_sha256"] = "same"
    found = summary.compare(table)
    accuracy = found.systems[1].accuracy
    assert (accuracy.accuracy, accuracy.num_prompts, accuracy.prompt_low) == (0.4, 1, None)
    (difference,) = found.differences
    assert difference.low is None
    assert tables.difference_table(found).rows[0][1:] == ["+60.0", "12 : 0", "0.0005"]
    assert tables.accuracy_table(found).rows[1][3] == "\N{EN DASH}"
    assert tables.accuracy_cell(accuracy) == "40.0"


def random_table(seed: int, num_pairs: int = 12) -> PairScores:
    generator = np.random.default_rng(seed)
    pairs = [
        pair(row, prompt_sha256=str(row // 2), source=f"part {row % 3}") for row in range(num_pairs)
    ]
    names = (f"rm{seed}", f"lm{seed}", "longer wins")
    draws = generator.normal(size=(3, num_pairs, 2))
    return PairScores(pairs, dict(zip(names, draws, strict=True)))


def test_a_table_is_read_as_it_was_written_to_the_last_bit(tmp_path: Path):
    table = random_table(0)
    records.write_records(table, [], tmp_path)
    again = records.read_scores(tmp_path / "scores.jsonl")
    assert again.pairs == table.pairs
    for name, scores in table.scores.items():
        assert (again.scores[name] == scores).all()
    assert summary.compare(again) == summary.compare(table)


def test_tables_show_every_system_and_its_numbers():
    found = summary.compare(random_table(3))
    by_title = {part.title: part.blocks[0] for part in tables.comparison_sections(found)}
    assert list(by_title) == [
        "Preference accuracy of every system",
        "Differences on the same pairs",
        "Accuracy by source",
    ]
    accuracy = found.systems[0].accuracy
    first = by_title["Preference accuracy of every system"].rows[0]
    assert first[:2] == ["rm3", f"{100 * accuracy.accuracy:.1f}"]
    ((pair, gain, *_),) = by_title["Differences on the same pairs"].rows
    assert pair == "rm3 - lm3"
    assert gain.startswith(f"{100 * found.differences[0].difference:+.1f}")
    assert tables.p_value(0.00001) == "< 0.0001"


def test_of_many_systems_each_is_compared_with_the_best_and_baselines_with_none():
    table = random_table(0)
    draws = np.random.default_rng(1).normal(size=(10, 12, 2))
    names = [*(f"rm{i}" for i in range(1, 7)), *BASELINES]
    table.scores |= dict(zip(names, draws, strict=True))
    found = summary.compare(table)
    shown = tables.difference_table(found).rows
    best = max(found.systems, key=lambda score: score.accuracy.accuracy).name
    assert len(shown) == 7
    assert all(best in row[0].split(" - ") for row in shown)
    few = replace(found, systems=[s for s in found.systems if s.name in ("rm0", *BASELINES)])
    titles = [part.title for part in tables.comparison_sections(few)]
    assert "Differences on the same pairs" not in titles


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Two policies and a reward model of one vocabulary, and one of another."""
    root = tmp_path_factory.mktemp("systems")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    other = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer, eos_token="<|endoftext|>"
    )
    shape = {"is_plain": True, "vocab_size": len(tokenizer), "n_positions": 192}
    foreign = {"is_plain": True, "vocab_size": 300, "max_position_embeddings": 512}
    with tiny.process_group():
        models = {
            "sft": tiny.causal_lm("gpt2", seed=0, **shape),
            "dpo": tiny.causal_lm("gpt2", seed=1, **shape),
            "reward": tiny.classifier("gpt2", **shape),
            "foreign": tiny.classifier("llama", **foreign),
        }
    for name, model in models.items():
        tiny.save(model, root / name / "model", other if name == "foreign" else tokenizer)
    tiny.write_run_config(root / "dpo", beta=0.3)
    return root


def evaluate_pairs(folders: Path, name: str, policies: Sequence[str], **fields: Any) -> Path:
    """The folder of an evaluation of these policies."""
    paths = [str(folders / policy / "model") for policy in policies]
    flags = {"output_dir": str(folders / name), "policies": paths, "num_eval_rows": NUM_PAIRS}
    with tiny.process_group():
        evaluate.main(evaluate.EvaluateConfig(**flags, **LENGTHS, **fields))
    return folders / name


@pytest.fixture(scope="module")
def evaluation(folders: Path) -> Path:
    """The folder of an evaluation of all of them."""
    judges = [str(folders / name / "model") for name in ("reward", "foreign")]
    readings = ["implicit_reward", "logp_per_token"]
    fields = {"reward_models": judges, "policy_scores": readings, "num_prompts": 2}
    return evaluate_pairs(folders, "evaluation", ["sft", "dpo"], **fields)


def test_an_earlier_evaluation_is_removed_and_that_is_said(tmp_path: Path, capsys: Any) -> None:
    evaluate.remove_earlier(tmp_path)
    assert capsys.readouterr().out == ""
    for name in ("report.html", "results.json", "mine.txt"):
        (tmp_path / name).touch()
    evaluate.remove_earlier(tmp_path)
    assert capsys.readouterr().out == f"the earlier evaluation in {tmp_path} is removed\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_file_alone_gives_every_number_again_and_the_report_shows_them(evaluation: Path):
    results = read_results(evaluation / "results.json")
    table = records.read_scores(evaluation / "scores.jsonl")
    assert summary.compare(table) == results.comparison
    assert list(table.scores) == [
        "reward",
        "foreign",
        "sft logp",
        "sft logp_per_token",
        "dpo implicit_reward",
        "dpo logp_per_token",
        *BASELINES,
    ]
    by_hand = {
        name: np.mean([float(c > r) + 0.5 * (c == r) for c, r in scores])
        for name, scores in table.scores.items()
    }
    compared = {score.name: score.accuracy.accuracy for score in results.comparison.systems}
    assert compared == pytest.approx(by_hand)
    main_rows = {s.name: s.accuracy.accuracy for s in results.systems}
    first = {"sft": "sft logp", "dpo": "dpo implicit_reward"}
    assert main_rows == pytest.approx({n: by_hand[first.get(n, n)] for n in main_rows})
    assert set(main_rows) == {"reward", "foreign", "sft", "dpo"}
    report = (evaluation / "report.md").read_text()
    sections = tables.comparison_sections(results.comparison)
    assert all(section.title in report for section in sections)


@torch.no_grad()
def test_scores_are_those_of_transformers_on_single_texts(folders: Path, evaluation: Path):
    rows = synthetic.make_rows("preference", "validation", NUM_PAIRS)
    table = records.read_scores(evaluation / "scores.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(folders / "sft" / "model")
    other = AutoTokenizer.from_pretrained(folders / "foreign" / "model")
    lms = [AutoModelForCausalLM.from_pretrained(folders / n / "model") for n in ("sft", "dpo")]
    judges = {
        n: AutoModelForSequenceClassification.from_pretrained(folders / n / "model")
        for n in ("reward", "foreign")
    }
    for i, row in enumerate(rows[:8]):
        for side, text in enumerate((row["chosen"], row["rejected"])):
            prompt, completion = (tokenizer(t)["input_ids"] for t in (row["prompt"], text))
            completion = [*completion, tokenizer.eos_token_id]
            ids = torch.tensor([prompt + completion])
            sft, dpo = (float(tiny.plain_logps(lm, prompt, completion).sum()) for lm in lms)
            foreign = [*other(row["prompt"])["input_ids"], *other(text)["input_ids"], 0]
            expected = {
                "sft logp": sft,
                "dpo implicit_reward": 0.3 * (dpo - sft),
                "dpo logp_per_token": dpo / len(completion),
                "reward": float(judges["reward"](ids).logits),
                "foreign": float(judges["foreign"](torch.tensor([foreign])).logits),
            }
            scores = {name: table.scores[name][i, side] for name in expected}
            assert scores == pytest.approx(expected, abs=2e-4)
        line = table.pairs[i]
        assert line["label_probability"] == row["label_probability"]


def foreign_rewards(root: str) -> list[list[float]]:
    """Rewards of five pairs by the model of another vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(f"{root}/sft/model")
    config = tiny.train_config(**LENGTHS)
    vocabulary = tiny.vocabulary([tokenizer.eos_token_id], tokenizer)
    pairs = reading.load_examples(
        config, "synthetic", "validation", "preference", vocabulary, num_rows=5
    )
    function = RewardModelFunction(f"{root}/foreign/model", tokenizer, config)
    function.load(distributed.mesh())
    return measure.reward_scores(function, pairs, vocabulary, config).tolist()


def test_two_ranks_share_the_pairs_of_a_model_of_another_vocabulary(folders, evaluation, tmp_path):
    table = records.read_scores(evaluation / "scores.jsonl")
    expected = table.scores["foreign"][:5]
    for rewards in launch(foreign_rewards, 2, tmp_path, root=str(folders)):
        assert np.array(rewards) == pytest.approx(expected, abs=1e-5)


def test_a_policy_with_another_tokenizer_is_refused(folders: Path):
    tokenizer = AutoTokenizer.from_pretrained(folders / "sft" / "model")
    config = tiny.train_config(model_name_or_path=str(folders / "sft" / "model"))
    for name in ("sft", "dpo"):
        load.refuse_other_tokenizer(str(folders / name / "model"), tokenizer, config)
    with pytest.raises(UserError, match="another tokenizer .* cannot be in one run"):
        load.refuse_other_tokenizer(str(folders / "foreign" / "model"), tokenizer, config)


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"beta": 0.3}, ImplicitReward(beta=0.3)), ({"beta": 0}, ImplicitReward())],
)
def test_a_policy_is_judged_by_the_reward_of_its_run(tmp_path, values, expected):
    folder = tmp_path / "model"
    folder.mkdir()
    assert runs.reward_of_run(str(folder)) == ImplicitReward()
    tiny.write_run_config(tmp_path, **values)
    assert runs.reward_of_run(str(folder)) == expected
    tiny.write_run_config(tmp_path, beta=2, loss_type=["simpo"])
    with pytest.raises(UserError, match="a DPO run that names no implicit_reward: train it again"):
        runs.reward_of_run(str(folder))


TRL = {"learning_rate": 1e-6, "beta": 0.04, "loss_type": "dapo", "max_completion_length": 9}
FOREIGN = {  # what other tools leave next to a model
    "a recipe of TRL": yaml.safe_dump(TRL | {"model_name_or_path": "owner/name"}),
    "a schedule of beta": "beta: linear",
    "tags of Python": "device: !!python/object/apply:torch.device ['cpu']",
    "a date that is none": "date: 2026-99-99",
    "a list": "[1]",
    "an empty file": "",
    "no YAML": "a: [",
    "no text": b"\x00\xff",
}


@pytest.mark.parametrize("content", [*FOREIGN.values(), None], ids=[*FOREIGN, "a folder"])
def test_what_another_tool_left_next_to_a_model_makes_it_no_run_s(tmp_path, content):
    folder = tmp_path / "checkpoints" / "step_best" / "model"
    run_dir = folder.parent
    folder.mkdir(parents=True)
    for name in ("config.yaml", "environment.json"):
        if content is None:
            (run_dir / name).mkdir()
        else:
            (run_dir / name).write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
    (run_dir / "metrics.jsonl").write_text('{"loss": 1}\nnone\n[1]\n')
    assert runs.config_of_run(str(folder)) == {}
    assert runs.reward_of_run(str(folder)) == ImplicitReward()
    assert runs.reference_of_run(str(folder)) == ""
    system = summary.describe_system(str(folder), "logp", {str(folder): "x"}, (), None, ())
    assert system.minutes is None


@pytest.mark.parametrize("config", [SFTConfig, RewardConfig, DPOConfig, GRPOConfig, EvaluateConfig])
def test_every_run_that_trains_is_known_by_its_config(config):
    names = {f.name for f in fields(config)}
    assert (names >= MARKS_OF_TRAINING) == (config is not EvaluateConfig)


def test_the_reference_of_one_policy_is_where_its_run_started(tmp_path: Path):
    run_dir, start = tmp_path / "dpo", tmp_path / "sft"
    folder = run_dir / "model"
    folder.mkdir(parents=True)
    assert runs.reference_of_run(str(folder)) == ""
    tiny.write_run_config(run_dir, model_name_or_path=str(start))
    assert runs.reference_of_run(str(folder)) == ""  # it is not there any more
    start.mkdir()
    assert runs.reference_of_run(str(folder)) == str(start)
    tiny.write_run_config(run_dir, model_name_or_path="owner/name")  # on the hub
    assert runs.reference_of_run(str(folder)) == "owner/name"
