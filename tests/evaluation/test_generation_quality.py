"""Claim: the numbers of generations are right, and are a function of completions.jsonl alone.

Targets: transformers' own logits on single rows, Google's rouge-score, plain sums over the lines of
the file; the same lines from 1 and from 2 ranks. About `common.evaluation.measure`,
`common.evaluation.judges` and `common.evaluation.results`.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM

import evaluate
from common import distributed
from common.checkpoint import export
from common.config.parser import parse
from common.errors import UserError
from common.evaluation import measure, records, summary
from common.evaluation.intervals import mean_over_prompts
from common.evaluation.records import BASELINES, REFERENCE, PairScores, read_scores
from common.evaluation.results import read_results, write_results
from common.evaluation.win_rates import all_win_rates
from common.forward import Policy, RewardModel
from common.model import fsdp, load
from common.sampling.sampler import Sampler
from common.text.example import Example

STOP, PAD, LONGEST = 0, 1, 12
LENGTHS = {"max_prompt_length": 60, "max_completion_length": LONGEST}
WORDS = ["key", "dog", "house", "cake", "phone", "sister", "brother", "boss", "station", "park"]
ROWS = [
    {
        "prompt": f"my {WORDS[i % 10]} is lost at the {WORDS[i // 3]}\n\nTL;DR:",
        "completion": f" lost {WORDS[i % 10]} at the {WORDS[(i + 1) // 3]}" if i % 7 else None,
        "bonus": i,
    }
    for i in range(24)
]
ROWS += ROWS[:4]  # prompts that are there twice
JUDGE = """
def longer(prompts, completions_a, completions_b, bonus, **columns):
    assert len(prompts) == len(bonus) and all(type(b) is int for b in bonus)
    pairs = zip(completions_a, completions_b, bonus)
    return [None if k == 5 else 0.5 + 0.5 * (len(a) > len(b)) - 0.5 * (len(a) < len(b))
            for a, b, k in pairs]

def bonus(prompts, completions, completion_ids, bonus, **columns):
    return [None if k % 5 == 0 else float(len(c)) for c, k in zip(completions, bonus)]

def short(completions, bonus, **columns):
    return [None if k == 5 else float(len(c) < 8) for c, k in zip(completions, bonus)]

short.answer = lambda completions: [len(c) // 4 if c else None for c in completions]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies, a reward model, rows and judges."""
    path = tmp_path_factory.mktemp("quality")
    for seed, name in enumerate(("sft", "dpo")):
        lm = tiny.causal_lm("gpt2", seed=seed, vocab_size=300, is_plain=True)
        with torch.no_grad():  # a stop token that is drawn often enough
            lm.transformer.ln_f.bias += 8.0 * lm.lm_head.weight[STOP]
        tiny.save(lm, path / name / "model")
    with tiny.process_group():
        lm = tiny.classifier("llama", vocab_size=300, pad_id=PAD)
        model = fsdp.shard(RewardModel(lm), tiny.train_config(), distributed.mesh())
        export.save_pretrained(model, tiny.vocabulary(), path / "reward" / "model")
    (path / "judge.py").write_text(JUDGE)
    tiny.write_rows(path / "prompts" / "validation.jsonl", ROWS)
    pairs = [
        {"prompt": row["prompt"], "chosen": " a key", "rejected": " a dog"} for row in ROWS[:3]
    ]
    tiny.write_rows(path / "pairs" / "validation.jsonl", pairs)
    return path


def arguments(folder: Path, output_dir: str) -> list[str]:
    values = {
        "output_dir": folder / output_dir,
        "dataset_name": folder / "pairs",
        "prompts_dataset_name": folder / "prompts",
        "policies": [folder / "sft" / "model", folder / "dpo" / "model"],
        "reward_models": [folder / "reward" / "model"],
        "reward_funcs": [f"{folder / 'judge.py'}:bonus", "length"],
        "judge_funcs": [f"{folder / 'judge.py'}:longer"],
        "micro_batch_size": 5,
        "num_prompts": len(ROWS),
        **LENGTHS,
    }
    return [text for key, value in values.items() for text in ranks.flag(key, value)]


def evaluate_here(argv: list[str]) -> None:
    evaluate.main(parse(evaluate.EvaluateConfig, argv))


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Of an evaluation by one process."""
    with tiny.process_group():
        evaluate_here(arguments(folder, "one"))
    return json.loads((folder / "one" / "results.json").read_text())


@pytest.fixture(scope="module")
def lines(folder: Path, results: dict[str, Any]) -> list[dict[str, Any]]:
    text = (folder / "one" / "completions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# ---- one completion ------------------------------------------------------------------------------


@torch.no_grad()
def test_kl_and_entropy_are_those_of_transformers_logits(folder):
    with tiny.process_group():
        policies = [Policy(tiny.causal_lm("gpt2", seed=seed, vocab_size=300)) for seed in (3, 4)]
        config = tiny.train_config(**LENGTHS)
        judges = tiny.reward_functions(["length"], **LENGTHS)
        prompts = [tiny.ragged_examples([(5 + i, 1)], vocab_size=300)[0] for i in range(6)]
        sampler = Sampler(policies[0], tiny.vocabulary([STOP]), config)
        rollouts = sampler.sample_shared(prompts, temperature=1.0, title="sampling")
        arguments = (judges, prompts, rollouts, config)
        measured = measure.measure_completions(*policies, *arguments, 1.0)
        itself = measure.measure_completions(policies[0], policies[0], *arguments, 1.0)
        colder = measure.measure_completions(*policies, *arguments, 0.7)
    plain = [tiny.causal_lm("gpt2", seed=seed, vocab_size=300, is_plain=True) for seed in (3, 4)]
    for example, ids, one in zip(prompts, rollouts.completion_ids, measured, strict=True):
        logps = [tiny.plain_logits(lm, example.prompt_ids, ids).log_softmax(-1) for lm in plain]
        drawn = [values[torch.arange(len(ids)), ids].sum() for values in logps]
        assert one.kl == pytest.approx(float(drawn[0] - drawn[1]), abs=1e-4)
        entropy = -(logps[0].exp() * logps[0]).sum(-1).mean()
        assert one.entropy == pytest.approx(float(entropy), abs=1e-4)
        assert one.rewards == {"length": -len(ids)}
        assert one.num_tokens == len(ids)
    assert len({round(one.kl, 3) for one in measured}) == 6
    assert [one.kl for one in itself] == [0] * 6
    assert [one.kl for one in colder] == [None] * 6
    assert [one.entropy for one in colder] == [one.entropy for one in measured]


def test_a_reference_that_is_too_long_is_cut_for_the_judges_only():
    judges = tiny.reward_functions(["length"], **LENGTHS)
    texts = [" a key", " a key" * 20, None, "  ", [{"role": "assistant", "content": " a key"}], 3]
    examples = [
        replace(tiny.ragged_examples([(4,)])[0], columns={"completion": text}) for text in texts
    ]
    references = measure.reference_completions(judges, examples, LONGEST)
    assert sorted(references) == [0, 1, 4]
    short, long, message = references.values()
    assert (short.completion, short.stopped) == (texts[0], True)
    assert short.num_tokens == 1 + len(tiny.tokenizer()(texts[0])["input_ids"])
    assert (long.completion, long.num_tokens, long.stopped) == (texts[1], LONGEST, False)
    assert message.completion == " a key"
    assert short.rouge_l is None


def test_a_reference_in_a_conversation_ends_as_the_template_ends_it():
    """The text is the message's; the tokens are those a policy would have to write."""
    tokenizer = tiny.with_template(tiny.tokenizer(), tiny.TURNS)
    judges = tiny.reward_functions(["length", "count:e"], of=tokenizer, **LENGTHS)
    asked, answer = ({"role": r, "content": c} for r, c in (("user", "why"), ("assistant", "the")))
    examples = [
        Example(0, "", [5, 6], [], {"completion": completion}, "other", [asked])
        for completion in ([answer], "the")
    ]
    references = measure.reference_completions(judges, examples, LONGEST)
    assert len(references) == 2
    for one in references.values():
        num_tokens = len(tokenizer("the")["input_ids"]) + 1
        assert (one.completion, one.num_tokens, one.stopped) == ("the", num_tokens, True)
        assert one.rewards == {"length": -num_tokens, "count:e": 1}


# ---- the whole evaluation ------------------------------------------------------------------------


def test_every_number_is_a_function_of_the_file(folder, results):
    answers = records.read_completions(folder / "one")
    assert len(answers) == len(ROWS)
    file = folder / "one" / "results.json"
    again = read_results(file)
    for system in again.systems:
        assert system.generations == summary.summarise(answers, system.name)
    assert again.reference_completions == summary.summarise(answers, REFERENCE)
    assert again.win_rates == all_win_rates(answers)
    write_results(again, folder)
    assert (folder / "results.json").read_text() == file.read_text()
    assert json.loads(file.read_text()) == results
    records.write_records(PairScores([]), answers, folder)
    written = [(path / "completions.jsonl").read_bytes() for path in (folder, folder / "one")]
    assert written[0] == written[1]


def test_the_file_holds_what_is_needed_to_recompute_the_table(results, lines):
    """By plain sums and another library, from the texts and numbers of the lines."""
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for system in results["systems"]:
        if system["kind"] != "policy":
            continue
        own = [line["systems"][system["name"]] for line in lines]
        references = [line["reference"] for line in lines]
        tokens = np.array([one["num_tokens"] for one in own])
        assert system["length"] == pytest.approx(tokens.mean())
        assert system["stop_rate"] == pytest.approx(np.mean([one["stopped"] for one in own]))
        assert 0 < system["stop_rate"] < 1
        assert system["kl"]["mean"] == pytest.approx(np.mean([one["kl"] for one in own]))
        entropy = np.array([one["entropy"] for one in own])
        assert system["entropy"]["mean"] == pytest.approx((entropy * tokens).sum() / tokens.sum())
        bonus = [one["rewards"]["bonus"] for one in own]
        assert [value is None for value in bonus] == [row["bonus"] % 5 == 0 for row in ROWS]
        measured = [value for value in bonus if value is not None]
        assert system["rewards"]["bonus"]["mean"] == pytest.approx(np.mean(measured))
        assert system["rewards"]["bonus"]["count"] == len(measured) < len(ROWS)
        scores = [
            scorer.score(reference["completion"], one["completion"])
            for one, reference in zip(own, references, strict=True)
            if reference
        ]
        for key, name in (("rouge_1", "rouge1"), ("rouge_2", "rouge2"), ("rouge_l", "rougeL")):
            expected = np.mean([score[name].fmeasure for score in scores])
            assert system[key]["mean"] == pytest.approx(expected)
            assert system[key]["count"] == len(scores) == sum(i % 7 > 0 for i in range(24)) + 3
        assert system["reward"] == system["rewards"]["reward"]
        assert system["gold_reward"] is None
        texts = {one["completion"].strip() for one in own}
        assert system["distinct_completions"] == len(texts) / len(lines)


@torch.no_grad()
def test_the_file_holds_the_tokens_that_the_kl_is_of(folder, lines):
    lms = [AutoModelForCausalLM.from_pretrained(folder / name / "model") for name in ("sft", "dpo")]
    for line in lines[:6]:
        own = line["systems"]["dpo"]
        assert len(own["completion_ids"]) == own["num_tokens"]
        of_ref, of_policy = (
            tiny.plain_logps(lm, line["prompt_ids"], own["completion_ids"]).sum() for lm in lms
        )
        assert own["kl"] == pytest.approx(float(of_policy - of_ref), abs=1e-4)


def test_a_judge_that_fails_loses_nothing_that_was_measured_before_it(folder, results, lines):
    """A second judge leaves the verdicts of the first."""
    (folder / "broken.py").write_text("def judge(prompts, **columns):\n    raise OSError('away')\n")
    broken = f"{folder / 'broken.py'}:judge"
    argv = [*arguments(folder, "broken"), "--judge_funcs", f"{folder / 'judge.py'}:longer", broken]
    (folder / "broken").mkdir()
    of_before = [folder / "broken" / name for name in ("results.json", "report.html", "report.md")]
    for path in of_before:
        path.write_text("{}")
    message = "OSError: away .*; what was measured before is in"
    with tiny.process_group(), pytest.raises(UserError, match=message):
        evaluate_here(argv)
    assert not any(path.exists() for path in of_before)
    measured = records.read_completions(folder / "broken")
    assert [(answer.systems, answer.verdicts) for answer in measured] == [
        (answer.systems, answer.verdicts) for answer in records.read_completions(folder / "one")
    ]
    scores = read_scores(folder / "broken" / "scores.jsonl").scores
    whole = read_scores(folder / "one" / "scores.jsonl").scores
    assert set(whole) - set(scores) == set(BASELINES)
    assert all((scores[name] == whole[name]).all() for name in scores)


def test_verdicts_are_those_of_the_judge(results, lines):
    """`test_win_rates.py` has what becomes of them."""
    pairs = [("dpo", "sft"), ("sft", REFERENCE), ("dpo", REFERENCE)]
    rates = {(r["a"], r["b"], r["judge"]) for r in results["win_rates"]}
    assert rates == {(*p, j) for p in pairs for j in ("reward", "bonus", "length", "longer")}
    for line in lines:
        sides = line["systems"] | ({REFERENCE: line["reference"]} if line["reference"] else {})
        assert len(line["verdicts"]) == (0 if line["id"] == 5 else {2: 1, 3: 3}[len(sides)])
        for one in line["verdicts"]:
            lengths = [len(sides[one[side]]["completion"]) for side in "ab"]
            assert one["a_wins"] == 0.5 + 0.5 * np.sign(lengths[0] - lengths[1])


def test_several_samples_of_rows_without_pairs(folder, lines, monkeypatch):
    """The first is the one that is drawn alone; means are of all, and rates of each prompt's."""
    monkeypatch.setattr(load, "extract_commit_hash", lambda *_: "of the first policy")
    argv = arguments(folder, "several") + ["--num_generations", "3"]
    argv += ["--dataset_name", str(folder / "prompts"), "--prompts_dataset_name", ""]
    argv += ["--reward_models", "--judge_funcs"]
    argv += ["--reward_funcs", f"{folder / 'judge.py'}:short", "length"]
    with tiny.process_group():
        evaluate_here(argv)
    assert not (folder / "several" / "scores.jsonl").exists()
    environment = folder / "several" / "environment.json"
    assert json.loads(environment.read_text())["model_commit"] == "of the first policy"
    results = json.loads((folder / "several" / "results.json").read_text())
    assert (results["num_pairs"], results["comparison"]) == (0, None)
    assert "ccuracy" not in (folder / "several" / "report.md").read_text()
    answers = records.read_completions(folder / "several")
    for line, answer in zip(lines, answers, strict=True):
        for name in ("sft", "dpo"):
            own, *rest = answer.all_of(name)
            assert own.completion_ids == line["systems"][name]["completion_ids"]
            assert own.kl == pytest.approx(line["systems"][name]["kl"], abs=1e-4)
            assert len(rest) == 2
            for one in (own, *rest):
                is_short = None if line["id"] == 5 else float(len(one.completion) < 8)
                assert one.rewards == {"short": is_short, "length": -one.num_tokens}
                assert one.answers == {
                    "short": str(len(one.completion) // 4) if one.completion else None
                }
    for system in results["systems"]:
        groups = [row.all_of(system["name"]) for row in answers]
        every = [own for group in groups for own in group]
        assert len({tuple(own.completion_ids) for own in every}) > len(answers)
        assert system["length"] == pytest.approx(np.mean([own.num_tokens for own in every]))
        prompts = [row.prompt for row in answers for _ in range(3)]
        assert system["kl"] == asdict(mean_over_prompts([own.kl for own in every], prompts))
        assert system["kl"]["count"] == 3 * len(answers)
        passed = [[own.rewards["short"] for own in group] for group in groups if group]
        known = np.array([own for own in passed if None not in own])
        assert len(known) == len(answers) - 1
        (rates,) = system["pass_rates"].values()
        assert list(rates) == ["pass@1", "pass@2", "pass@3", "maj@3"]
        assert 0 < rates["pass@1"]["mean"] < rates["pass@3"]["mean"]
        assert rates["pass@1"]["mean"] == pytest.approx(known.mean())
        assert rates["pass@3"]["mean"] == pytest.approx(known.any(1).mean())
        assert rates["pass@1"]["low"] < rates["pass@1"]["mean"] < rates["pass@1"]["high"]
        for key in ("mean", "low", "high"):  # one number, one interval
            assert system["rewards"]["short"][key] == pytest.approx(rates["pass@1"][key])


def test_two_ranks_write_what_one_writes(folder, results, lines):
    argv = arguments(folder, "two")
    ranks.launch(evaluate_here, 2, folder, argv=argv)
    text = (folder / "two" / "completions.jsonl").read_text(encoding="utf-8")
    others = [json.loads(line) for line in text.splitlines()]
    lm = AutoModelForCausalLM.from_pretrained(folder / "sft" / "model")
    limit = LONGEST * tiny.rounding(lm)  # numbers of a completion are sums over its tokens
    assert same(others, lines, limit)
    other_results = json.loads((folder / "two" / "results.json").read_text())
    for key in ("win_rates", "reference_completions"):
        assert same(other_results[key], results[key], limit)


def same(found: Any, expected: Any, limit: float) -> bool:
    """Whether two JSON values are the same but for the rounding of float32."""
    if isinstance(expected, dict):
        keys_agree = found.keys() == expected.keys()
        return keys_agree and all(same(found[key], expected[key], limit) for key in found)
    if isinstance(expected, list):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(same(*pair, limit) for pair in pairs)
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, abs=limit))
    return bool(found == expected)
