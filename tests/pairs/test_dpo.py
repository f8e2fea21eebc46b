"""Claim: every loss and option trains what its paper says, on any number of ranks.

Runs of a few steps with a model of two layers, on one rank and on two, whose first loss is worked
out here from plain log-probabilities; and the flags that contradict each other. About `train_dpo`,
`train_reward` and `common.pairs.reference`.
"""

import json
import math
import pickle
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from ranks import launch, run_stages, untimed_lines
from transformers import AutoTokenizer, GPT2LMHeadModel

import evaluate
import train_dpo
import train_reward
from common.batch import padded_batch
from common.config.evaluate import EvaluateConfig
from common.data import BatchOrder
from common.errors import UserError
from common.forward import Policy, RewardModel
from common.model import load
from common.pairs import reference
from common.record import output_lock
from common.record.jsonl import read_jsonl
from common.report import evaluation_report
from common.text.example import Example
from train_dpo import DPOConfig
from train_reward import RewardConfig

STEPS, NUM_ROWS, BATCH = 3, 7, 4  # the second batch has one row less: filler
WORDS = ("cat", "dog", "bird", "fish", "horse", "cow", "mouse")

COMMON = {
    "dataset_test_split": "",
    "max_prompt_length": 64,
    "max_completion_length": 16,
    "batch_size": BATCH,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "max_steps": STEPS,
    "num_sample_prompts": 1,
    "lr_scheduler_type": "constant",
}
JOBS: dict[str, dict[str, Any]] = {
    "sum": {
        "loss_type": ["sigmoid", "ipo", "hinge", "sft"],
        "loss_weights": [1.0, 0.02, 0.5, 0.3],
        "ref_model_name_or_path": "FOLDER/other",
    },
    "per_token": {
        "loss_type": ["ipo_mean", "simpo:gamma=0.5", "sigmoid_norm"],
        "beta": 2.0,
        "ref_model_name_or_path": "FOLDER/other",
    },
    "simpo": {"loss_type": ["simpo:gamma=0.5"], "beta": 2.0},
    "reference_free": {"reference_free": True, "loss_type": ["sigmoid:label_smoothing=0.1"]},
    "padded": {"layout": "padded"},
}
REWARD_JOBS: dict[str, dict[str, Any]] = {
    "reward": {"center_rewards_coefficient": 0.1, "margin_column": "margin"},
}
# Two ranks pack their rows into unequal numbers of micro-batches: some have a filler only.
SPLITS = {1: {"micro_batch_size": 8}, 2: {"micro_batch_tokens": 60}}


@dataclass
class Runs:
    """What the runs left, and the files they started from."""

    folder: Path
    pairs: list[dict[str, Any]]

    def series(self, num_ranks: int, job: str, metric: str) -> list[float]:
        lines = read_jsonl(self.folder / str(num_ranks) / job / "metrics.jsonl")
        return [line[metric] for line in lines if metric in line]


def flags_of(folder: Path, output_dir: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """Flags of a run on the pairs in a folder, whose path stands for FOLDER."""
    flags = json.loads(json.dumps(COMMON | flags).replace("FOLDER", str(folder)))
    paths = {"model_name_or_path": folder / "start", "dataset_name": folder / "train.jsonl"}
    paths |= {"output_dir": output_dir}
    return flags | {name: str(path) for name, path in paths.items()}


def uneven_first_step(rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Flags of a run of one step without row 0 in which one of two ranks has a filler.

    The other needs two forward passes for its rows.
    """
    names = ("prompt", "chosen", "rejected")
    lengths = [sum(len(tokenizer(row[name])["input_ids"]) for name in names) + 2 for row in rows]
    for seed in range(100):
        ranks = [
            BatchOrder(lengths, BATCH, seed=seed, rank=rank, world_size=2).rows(0)
            for rank in (0, 1)
        ]
        tokens = [sum(lengths[row] for row in mine if row is not None) for mine in ranks]
        if tokens[0] != tokens[1] and 0 not in ranks[0] + ranks[1]:
            return {"seed": seed, "micro_batch_tokens": min(tokens), "max_steps": 1}
    raise AssertionError("no such step")


def make_pairs() -> list[dict[str, Any]]:
    """Seven pairs of four prompts, with margins; the chosen are longer in four of them."""
    rows = []
    for i, word in enumerate(WORDS):
        longer, shorter = f" the {word} sat on the mat", f" a {word}"
        chosen, rejected = (longer, shorter) if i % 2 == 0 else (shorter, longer)
        prompt = f"A story about number {i % 4}.\n\nTL;DR:"
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": 0.1 * i})
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Runs:
    folder = tmp_path_factory.mktemp("dpo")
    tiny.save_stopping_model(folder / "start", tokenizer_folder, seed=1)
    tiny.save_stopping_model(folder / "other", tokenizer_folder, seed=2)
    pairs = make_pairs()
    tiny.write_rows(folder / "train.jsonl", pairs)
    uneven = uneven_first_step(pairs, AutoTokenizer.from_pretrained(tokenizer_folder))
    for num_ranks in (1, 2):
        jobs = JOBS | REWARD_JOBS | ({"uneven": uneven} if num_ranks == 2 else {})
        launched = [
            {
                "stage": "reward" if name in REWARD_JOBS else "dpo",
                "flags": flags_of(folder, folder / str(num_ranks) / name, SPLITS[num_ranks] | own),
            }
            for name, own in jobs.items()
        ]
        launch(run_stages, num_ranks, folder, jobs=launched)
    return Runs(folder, pairs)


@pytest.mark.parametrize("job", [*JOBS, *REWARD_JOBS])
@pytest.mark.parametrize("metric", ["loss", "grad_norm", "reward_margin"])
def test_two_ranks_train_what_one_does(runs: Runs, job: str, metric: str) -> None:
    one, two = runs.series(1, job, metric), runs.series(2, job, metric)
    assert len(one) == STEPS
    # A margin is beta, 0.1, times four sums of up to 16 log-probabilities of about log(1024) nats.
    rounding = 0.1 * 4 * 16 * math.log(1024) * torch.finfo(torch.float32).eps
    assert two == pytest.approx(one, rel=2e-5, abs=rounding)
    assert len(set(one)) == STEPS  # it moves


@dataclass
class Pair:
    """Log-probabilities of each token of a pair, under the policy and under the reference."""

    chosen: list[float]
    rejected: list[float]
    ref_chosen: list[float]
    ref_rejected: list[float]


@pytest.fixture(scope="module")
def scored(runs: Runs) -> list[Pair]:
    """All pairs, one sequence at a time through the models as transformers computes them."""
    tokenizer = AutoTokenizer.from_pretrained(runs.folder / "start")
    policies = [
        Policy(GPT2LMHeadModel.from_pretrained(runs.folder / name).eval())
        for name in ("start", "other")
    ]
    result = []
    for row in runs.pairs:
        batches = two_batches(row, tokenizer)
        with torch.no_grad():
            logps = [policy(batch).token_logps[0] for policy in policies for batch in batches]
        result.append(Pair(*(values.double().tolist() for values in logps)))
    return result


def two_batches(row: dict[str, Any], tokenizer: Any) -> list[Any]:
    """The chosen and the rejected completion, each alone."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    texts = (tokenizer(row[name])["input_ids"] for name in ("chosen", "rejected"))
    return [padded_batch([prompt], [[[*ids, tokenizer.eos_token_id]]], 0) for ids in texts]


def softplus(value: float) -> float:
    return math.log1p(math.exp(-abs(value))) + max(value, 0.0)


def gap(pair: Pair) -> float:
    """D: chosen minus rejected, policy minus reference."""
    policy = sum(pair.chosen) - sum(pair.rejected)
    return policy - (sum(pair.ref_chosen) - sum(pair.ref_rejected))


def sum_of_losses(pair: Pair) -> float:
    d, beta = gap(pair), 0.1
    sigmoid, ipo, hinge = softplus(-beta * d), (d - 1 / (2 * beta)) ** 2, max(0.0, 1 - beta * d)
    return sigmoid + 0.02 * ipo + 0.5 * hinge - 0.3 * mean(pair.chosen)


def simpo(pair: Pair) -> float:
    return softplus(-(2.0 * (mean(pair.chosen) - mean(pair.rejected)) - 0.5))


def per_token(pair: Pair) -> float:
    reference = mean(pair.ref_chosen) - mean(pair.ref_rejected)
    d = mean(pair.chosen) - mean(pair.rejected) - reference
    return (d - 1 / (2 * 2.0)) ** 2 + simpo(pair) + softplus(-2.0 * d)


def without_reference(pair: Pair) -> float:
    z = 0.1 * (sum(pair.chosen) - sum(pair.rejected))
    return 0.9 * softplus(-z) + 0.1 * softplus(z)


FIRST = {
    "sum": sum_of_losses,
    "per_token": per_token,
    "simpo": simpo,
    "reference_free": without_reference,
}


@pytest.mark.parametrize("job", FIRST)
def test_the_first_loss_is_the_papers_formula(runs, scored, job):
    rows = first_rows(NUM_ROWS)
    expected = mean([FIRST[job](scored[row]) for row in rows])
    assert runs.series(1, job, "loss")[0] == pytest.approx(expected, rel=1e-5)
    chosen = mean([sum(scored[row].chosen) for row in rows])
    assert runs.series(1, job, "chosen_logp")[0] == pytest.approx(chosen, rel=1e-5)


def first_rows(num_rows: int) -> list[int]:
    order = BatchOrder([1] * num_rows, BATCH)
    return [row for row in order.rows(0) if row is not None]


def test_the_implicit_reward_of_simpo_is_per_token(runs, scored):
    rows = first_rows(NUM_ROWS)
    margins = [2.0 * (mean(scored[row].chosen) - mean(scored[row].rejected)) for row in rows]
    assert runs.series(1, "simpo", "reward_margin")[0] == pytest.approx(mean(margins), rel=1e-4)


def test_a_filler_is_no_loss_where_its_row_was_not_scored(runs):
    """Its place is row 0, which a run of less than an epoch may not score with the reference."""
    assert runs.series(2, "uneven", "loss") == [pytest.approx(math.log(2), abs=1e-6)]


JUDGED: dict[str, dict[str, Any]] = {  # one of the losses of sums, and each per token
    name: {"loss_type": [name]}
    for name in ("sigmoid", "sigmoid_norm", "ipo_mean", "simpo:gamma=0.5", "sft")
}
JUDGED |= {"free": {"reference_free": True}, "sum": {"loss_type": ["simpo", "sigmoid"]}}
JUDGED |= {"with sft": {"loss_type": ["sigmoid", "sft"]}}


@pytest.mark.usefixtures("process_group", "without_pictures")
@pytest.mark.parametrize("job", JUDGED)
def test_evaluation_judges_a_policy_as_its_training_does(runs, tmp_path, job, monkeypatch):
    monkeypatch.setattr(evaluation_report, "write_report", lambda *_: [])
    rows = {"dataset_name": str(runs.folder / "train.jsonl"), "dataset_test_split": "train"}
    more = {"num_sample_prompts": 0, "dataset_test_split": "train", "learning_rate": 3e-3}
    flags = flags_of(runs.folder, tmp_path / "dpo", more | JUDGED[job])
    train_dpo.main(DPOConfig(**flags))
    lines = read_jsonl(tmp_path / "dpo" / "metrics.jsonl")
    (trained,) = (line["eval_accuracy"] for line in lines if "eval_accuracy" in line)
    sizes = {name: flags[name] for name in ("max_prompt_length", "max_completion_length")}
    policy = {"policies": [str(tmp_path / "dpo" / "model")], "num_prompts": 0}
    evaluate.main(EvaluateConfig(**rows | sizes | policy, output_dir=str(tmp_path / "eval")))
    (system,) = json.loads((tmp_path / "eval" / "results.json").read_text())["systems"]
    assert system["accuracy"]["accuracy"] == pytest.approx(trained)


@pytest.mark.usefixtures("process_group", "without_pictures")
@pytest.mark.parametrize("job", ["sum", "per_token", "simpo", "reference_free", "reward"])
def test_the_held_out_loss_is_the_loss_of_training(runs, tmp_path, job):
    """Of the same rows and weights: the only step has all rows, and its learning rate moves none.

    What the loss of each job is, is worked out above.
    """
    more = {"batch_size": NUM_ROWS, "max_steps": 1, "learning_rate": 1e-12}
    more |= {"dataset_test_split": "train"} | (JOBS | REWARD_JOBS)[job]
    flags = flags_of(runs.folder, tmp_path, more)
    if job == "reward":
        train_reward.main(RewardConfig(**flags))
    else:
        train_dpo.main(DPOConfig(**flags))
    metrics = dict(pair for line in read_jsonl(tmp_path / "metrics.jsonl") for pair in line.items())
    for name in ("loss", "reward_margin", "accuracy"):
        assert metrics[f"eval_{name}"] == pytest.approx(metrics[name], rel=1e-5), name


@pytest.mark.usefixtures("process_group", "without_pictures")
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_first_loss_is_ln_2_to_the_last_digit(runs, tmp_path, layout, bf16, monkeypatch):
    """Policy and reference score the same micro-batches: even bfloat16 rounds them alike.

    MKL's float32 products may depend on where their inputs lie in memory (`MKL_CBWR=COMPATIBLE`).
    """
    scored, forward = {True: [], False: []}, Policy.forward  # with and without a gradient

    def noted(policy: Policy, batch: Any, **options: Any) -> Any:
        scored[torch.is_grad_enabled()].append(batch.input_ids)
        return forward(policy, batch, **options)

    monkeypatch.setattr(Policy, "forward", noted)
    more = {"bf16": bf16, "max_steps": 3, "micro_batch_size": 3, "num_sample_prompts": 0}
    more |= {"learning_rate": 1e-30, "layout": layout}
    flags = flags_of(runs.folder, tmp_path, more)
    train_dpo.main(DPOConfig(**flags))
    lines = [line for line in read_jsonl(tmp_path / "metrics.jsonl") if "loss" in line]
    for ids in scored[True][:3]:  # of the two steps of the first epoch
        assert any(torch.equal(ids, other) for other in scored[False])
    lm = GPT2LMHeadModel.from_pretrained(runs.folder / "start")
    # Both log-probabilities of a pair are sums of at most 16; the loss has half its margin's slope.
    limit = 1e-7 if bf16 else DPOConfig.beta * 16 * tiny.rounding(lm)
    assert [line["loss"] for line in lines] == pytest.approx([math.log(2)] * 3, abs=limit)
    if bf16:
        assert [line["accuracy"] for line in lines] == [0.5] * 3  # every pair is a tie


@pytest.mark.usefixtures("process_group", "without_pictures")
def test_a_resumed_run_scores_no_pair_again(runs, tmp_path, monkeypatch):
    """It ends in the same bits; of another reference, or from the start, it scores anew."""
    more = {"max_steps": 4, "save_steps": 2, "num_sample_prompts": 0, "micro_batch_size": 8}
    flags = flags_of(runs.folder, tmp_path / "run", more)
    train_dpo.main(DPOConfig(**flags))
    weights = tmp_path / "run" / "model" / "model.safetensors"
    whole, lines = weights.read_bytes(), untimed_lines(tmp_path / "run")
    for left in ("model", "checkpoints/step_00000004"):  # as if killed at the third step
        shutil.rmtree(tmp_path / "run" / left)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was made before")

    with monkeypatch.context() as patch:
        patch.setattr(reference, "compute_logps", refuse)
        train_dpo.main(DPOConfig(**flags))
        assert weights.read_bytes() == whole
        assert untimed_lines(tmp_path / "run") == lines
        for anew in (
            {"resume_from_checkpoint": "none"},
            {
                "ref_model_name_or_path": str(runs.folder / "other"),
                "resume_from_checkpoint": "latest",
            },
        ):
            with pytest.raises(AssertionError, match="made before"):
                train_dpo.main(DPOConfig(**flags | anew))


@pytest.mark.usefixtures("process_group", "without_pictures")
def test_the_first_reward_losses_by_hand(runs):
    """Every pair's loss before training: the margin column, and centring at 0.1."""
    folder = str(runs.folder / "start")
    config = tiny.train_config(max_prompt_length=64, max_completion_length=16)
    tokenizer = load.load_tokenizer(folder, config)
    load.add_own_pad_token(tokenizer)
    model_config = load.read_model_config(folder, "trunk", tokenizer, config)
    model = RewardModel(load.load_reward_model(folder, model_config, tokenizer, config).eval())
    each = []
    for row in (runs.pairs[number] for number in first_rows(NUM_ROWS)):
        with torch.no_grad():
            rewards = [float(model(batch)) for batch in two_batches(row, tokenizer)]
        difference = rewards[0] - rewards[1] - row["margin"]
        each.append(softplus(-difference) + 0.1 * sum(rewards) ** 2)
    for num_ranks in (1, 2):
        found = runs.series(num_ranks, "reward", "loss")[0]
        assert found == pytest.approx(mean(each), rel=1e-5)


def test_the_balance_of_lengths_is_recorded(runs):
    """The chosen completions are the longer ones of even rows; the second batch has three rows."""
    first, second = first_rows(NUM_ROWS), set(range(NUM_ROWS)) - {*first_rows(NUM_ROWS)}
    shares = [mean([float(row % 2 == 0) for row in rows]) for rows in (first, second)]
    for num_ranks in (1, 2):
        assert runs.series(num_ranks, "reward", "chosen_longer")[:2] == pytest.approx(shares)


def config(**fields: Any) -> DPOConfig:
    return DPOConfig(output_dir="unused", model_name_or_path="unused", **fields)


def test_which_runs_need_a_reference():
    def needs_reference(**flags: Any) -> bool:
        run = config(**flags)
        objective = run.find_objective()
        return objective.implicit_reward(1.0, reference_free=run.reference_free).needs_reference

    assert needs_reference()
    assert needs_reference(loss_type=["simpo", "ipo"])
    assert not needs_reference(loss_type=["simpo", "sft"])
    assert not needs_reference(reference_free=True)


REFUSED = [
    ({"loss_type": []}, "--loss_type is required"),
    ({"loss_type": ["dpo"]}, "--loss_type is 'dpo'; it must be file.py:function, or one of"),
    ({"loss_weights": [1.0, 2.0]}, "--loss_weights is [1.0, 2.0]; it must be empty, or one number"),
    ({"loss_weights": [0.0]}, "must be above 0"),
    ({"loss_type": ["sigmoid:gamma=1"]}, "--loss_type sigmoid has no setting 'gamma'; its"),
    ({"loss_type": ["simpo", "ipo:gamma=1"]}, "--loss_type ipo has no setting 'gamma'; its"),
    ({"loss_type": ["sigmoid:beta=1"]}, "--loss_type sigmoid has no setting 'beta'; its settings"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_flags_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(UserError) as refusal:
        config(**fields).find_objective()
    assert message in str(refusal.value)


def test_a_reference_that_is_not_finite_is_named(tmp_path):
    """It would otherwise pass for one that finds every completion certain."""
    scores = {"train": torch.tensor([[-1.0, -2.0], [-3.0, math.inf]], dtype=torch.float64)}
    for is_resumed in (False, True):  # from its file too
        with pytest.raises(RuntimeError, match=r"pair 1 .* \[-3.0, inf\]; they must be finite"):
            reference.kept_logps(tmp_path / "logps", lambda: scores, "a", is_resumed=is_resumed)


def test_only_scores_of_the_same_pairs_and_reference_are_kept(tmp_path):
    file = tmp_path / "logps"
    first, pair = torch.tensor([[-1.0, -2.0]]), Example(0, "a", [5], [[6, 0], [7, 0]], {})
    others = [
        reference.scores_key([pair], [0], first + 1e-6),
        reference.scores_key([replace(pair, completions=[[6, 0], [8, 0]])], [0], first),
        reference.scores_key([pair, pair], [0], first),
        reference.scores_key([pair], [0, 1], first),
    ]
    key, logps = reference.scores_key([pair], [0], first), {"train": first}
    reference.kept_logps(file, lambda: logps, key, is_resumed=False)
    for now, expected in ((key, first), *((other, first - 1) for other in others)):
        kept = reference.kept_logps(file, lambda: {"train": first - 1}, now, is_resumed=True)
        assert kept["train"].equal(expected)
        reference.kept_logps(file, lambda: logps, key, is_resumed=False)


def test_the_file_of_scores_is_written_under_a_lock_and_holds_no_code(tmp_path):
    """What a pickle of a class would make is not made."""
    scores, file = {"train": torch.tensor([[-1.0, -2.0]])}, tmp_path / "logps"
    with mock.patch.object(output_lock, "take") as take:
        reference.kept_logps(file, lambda: scores, "a", is_resumed=False)
    take.assert_called_once_with(tmp_path)
    torch.save({"key": "a", "logps": Path("anything")}, file)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        reference.kept_logps(file, lambda: scores, "a", is_resumed=True)


def test_a_loss_without_a_reference_gets_zeros():
    train_set, eval_set = [mock.sentinel.pair] * 3, [mock.sentinel.pair]
    logps = reference.no_reference(reference.PairSets(train_set, eval_set, mock.sentinel.order))
    assert logps.train.tolist() == [[0.0, 0.0]] * 3
    assert logps.held_out.tolist() == [[0.0, 0.0]]
    assert (logps.train.dtype, logps.held_out.dtype) == (torch.float32, torch.float64)
    assert logps.first is None
    rows = replace(logps, train=torch.arange(6.0).view(3, 2))
    batch = mock.Mock(pairs=mock.Mock(indices=torch.tensor([2, 0])))
    assert rows.of_batch(batch).tolist() == [[4.0, 5.0], [0.0, 1.0]]
