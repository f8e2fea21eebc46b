"""Claim: GRPO's evaluation agrees with other code on the policy's completions.

Log-ratios and implicit rewards are those of transformers alone, one unpadded sequence at a time;
rewards are what the function is known to give. The noise is the same at every step, and the policy
of a step before the first is its reference. About `common.grpo.held_out` and `common.grpo.monitor`.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from common.config.grpo import GRPOConfig
from common.evaluation.intervals import mean_over_prompts, share_over_prompts
from common.forward import Policy
from common.grpo import monitor
from common.grpo.held_out import HeldOut
from common.record.jsonl import read_jsonl
from common.record.logger import RunLogger
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Sampler
from common.text.example import Example

pytestmark = pytest.mark.usefixtures("process_group")

TEMPERATURE = 0.7
STOPS = range(12)  # of 61 tokens: some completions stop early
FUNCTIONS = """
def size(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def even(prompts, completions, completion_ids, **columns):
    return [None if len(p) % 2 else float(ids[0]) for p, ids in zip(prompts, completion_ids)]

def check(prompts, completions, **columns):
    return [float(p == "pp") for p in prompts]
"""


def models() -> list[Policy]:
    """A policy and another that stands for its reference."""
    return [Policy(tiny.causal_lm("gpt2", seed=seed)).requires_grad_(False) for seed in (1, 2)]


def held_out(folder: Path, policy: Policy, reference: Policy | None, **flags: Any) -> HeldOut:
    """Of nine prompts, the last of which have one text, and of four pairs."""
    (folder / "functions.py").write_text(FUNCTIONS)
    config = GRPOConfig(
        output_dir=str(folder),
        model_name_or_path="unused",
        reward_funcs=[f"{folder}/functions.py:{name}" for name in ("size", "even", "check")],
        temperature=TEMPERATURE,
        max_completion_length=6,
        penalize_missing_eos=False,
        micro_batch_size=3,
        **{"reward_weights": [1.0, 0.5, 0.0], **flags},
    )
    prompts = tiny.ragged_examples([(n,) for n in (5, 9, 3, 7, 4, 8, 6, 2, 2)])
    for place, example in enumerate(prompts):
        prompts[place] = Example(example.row, "p" * min(place, 7), example.prompt_ids, [], {})
    pairs = tiny.ragged_examples([(5, 4, 2), (3, 2, 6), (7, 1, 3), (4, 5, 5)])
    vocabulary = tiny.vocabulary(STOPS)
    scorer = RewardFunctions.find(config.reward_funcs, config.reward_weights, vocabulary, config)
    return HeldOut(Sampler(policy, vocabulary, config), scorer, reference, prompts, pairs, config)


def plain_logp(policy: Policy, *row: Any) -> float:
    """Log-probability of a completion: transformers' forward of one sequence, no padding."""
    return float(tiny.plain_logps(policy.lm, *row).sum())


def test_what_is_measured_is_what_other_code_says(tmp_path: Path) -> None:
    policy, reference = models()
    evaluator = held_out(tmp_path, policy, reference)
    metrics = evaluator.measure(0, 10)
    drawn = evaluator.sampler.sample(evaluator.prompts, temperature=TEMPERATURE)
    keys = [example.prompt for example in evaluator.prompts]
    ids, sizes = drawn.completion_ids, [len(row) for row in drawn.completion_ids]
    assert 1 < len(set(sizes)) < len(sizes)
    even = [None if len(key) % 2 else row[0] for key, row in zip(keys, ids, strict=True)]
    totals = [n + 0.5 * (x or 0) for n, x in zip(sizes, even, strict=True)]
    ratios = [
        plain_logp(policy, example.prompt_ids, row, TEMPERATURE)
        - plain_logp(reference, example.prompt_ids, row, TEMPERATURE)
        for example, row in zip(evaluator.prompts, ids, strict=True)
    ]
    expected = {
        "eval_reward/check": share_over_prompts([float(key == "pp") for key in keys], keys),
        "eval_reward": mean_over_prompts(totals, keys),
        "eval_reward/size": mean_over_prompts(sizes, keys),
        "eval_reward/even": mean_over_prompts(even, keys),
        "eval_completion_length": mean_over_prompts(sizes, keys),
        "eval_stop_rate": share_over_prompts([float(row[-1] in STOPS) for row in ids], keys),
        "eval_kl": mean_over_prompts(ratios, keys),
    }
    limits = {"eval_kl": max(sizes) * tiny.rounding(policy.lm, TEMPERATURE)}  # sums over tokens
    for name, interval in expected.items():
        head, slash, function = name.partition("/")
        for end, key in (("", "mean"), ("_low", "low"), ("_high", "high")):
            value = metrics.pop(f"{head}{end}{slash}{function}")
            assert value == pytest.approx(getattr(interval, key), abs=limits.get(name)), (name, end)
    better = []
    for e in evaluator.pairs:
        chosen, rejected = (
            plain_logp(policy, e.prompt_ids, ids) - plain_logp(reference, e.prompt_ids, ids)
            for ids in e.completions
        )
        better.append(chosen > rejected)
    assert 0 < sum(better) < len(better)
    assert metrics.pop("eval_accuracy") == sum(better) / len(better)
    assert set(metrics) == {"eval_accuracy_low", "eval_accuracy_high"}


@pytest.mark.parametrize("number", [1, 3])
def test_a_reward_of_checks_alone_is_a_share(tmp_path: Path, number: int) -> None:
    """In a sum with other functions, 0 and 1 may mean anything."""
    evaluator = held_out(tmp_path, models()[0], None, reward_weights=[0.0, 0.0, 1.0])
    if number == 1:
        names = [f"{tmp_path}/functions.py:check"]
        evaluator.scorer = RewardFunctions.find(names, [1.0], tiny.vocabulary(), evaluator.config)
    keys = [example.prompt for example in evaluator.prompts]
    over = share_over_prompts if number == 1 else mean_over_prompts
    interval = over([float(key == "pp") for key in keys], keys)
    metrics = evaluator.measure(0, 10)
    ends = [metrics[f"eval_reward{end}"] for end in ("_low", "_high")]
    assert ends == pytest.approx([interval.low, interval.high])


def test_two_steps_differ_by_the_policy_alone(tmp_path: Path) -> None:
    policy, reference = models()
    evaluator = held_out(tmp_path, policy, reference)
    first = evaluator.measure(3, 10)
    assert evaluator.measure(7, 10) == first
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight[5] += 0.3
    assert evaluator.measure(7, 10)["eval_kl"] != first["eval_kl"]


def test_pairs_are_compared_with_the_reference_of_the_start(tmp_path: Path) -> None:
    policy, reference = models()
    evaluator = held_out(tmp_path, policy, reference, ref_update_steps=1)
    before = evaluator.measure(0, 10)
    reference.load_state_dict(policy.state_dict())
    after = evaluator.measure(0, 10)
    assert after["eval_accuracy"] == before["eval_accuracy"]
    assert after["eval_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(before["eval_kl"]) > 0.01


def test_of_many_completions_of_a_prompt_the_best_the_middle_and_the_worst_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = [0.4, 0.9, 0.1, 0.5, 0.7, 0.3, 0.2]
    table = [
        {"prompt": f"p{n}", "completion": f"c{n}-{r}", "reward": r} for n in (0, 1) for r in rewards
    ]
    few = monitor.few_of_each(table, len(rewards))
    assert [row["completion"] for row in few] == [
        f"c{n}-{r}" for n in (0, 1) for r in (0.9, 0.4, 0.1)
    ]
    assert monitor.few_of_each(table[:2], 2) == [table[1], table[0]]
    config = tiny.train_config(output_dir=str(tmp_path))
    config.stage = "GRPO"  # type: ignore[misc]
    logger = RunLogger(config, 5)
    logger.samples(2, table, few)
    logger.close()
    printed = capsys.readouterr().out
    assert "c1-0.4" in printed
    assert "c1-0.5" not in printed
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(table)


def test_every_reward_function_has_a_column_before_its_weight(tmp_path, capsys):
    evaluator = held_out(tmp_path, models()[0], None, num_generations=2)
    logger = RunLogger(evaluator.config, 5)
    judged_by = (evaluator.sampler, evaluator.scorer)
    _, advantages = evaluator.config.find_objective()
    shown = (evaluator.prompts, advantages, evaluator.config)
    monitor.show_samples(logger, *judged_by, *shown, step=2)
    logger.close()
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert len(rows) == 2 * len(evaluator.prompts)
    for row in rows:
        assert row["reward/size"] in (len(row["completion"]), 1 + len(row["completion"]))
        assert row["reward/check"] == (row["prompt"] == "pp")
        assert (row["reward/even"] is None) == (len(row["prompt"]) % 2 == 1)
        assert row["reward"] == row["reward/size"] + 0.5 * (row["reward/even"] or 0)
    above, header = capsys.readouterr().out.partition("\n---")[0].splitlines()[-2:]
    assert above.split() == 3 * ["reward/"]
    assert header.split()[2:6] == ["reward", "size", "even", "check"]
