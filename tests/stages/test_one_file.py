"""Claim: the five scripts compute what `experiments/one_file.py` computes in plain PyTorch.

Five steps of SFT, reward model, DPO and GRPO from the same weights have the same loss, gradient
norm, accuracy and KL, and GRPO the same completions, token by token; `evaluate.py` has the same
table. The scripts run as they are used: under FSDP, a prompt computed once for its completions, and
in micro-batches. Only pairs whose scores are equal but for rounding are left out.

Two computations of a gradient are a tenth of `tiny.gradient_rounding` apart at most: for this model
1e-5 of its norm. A loss has fewer roundings. That of GRPO is a mean of advantages, which are about
1, and is itself near 0. Its KL is a sum over about four tokens of d^2 / 2, where d is up to 0.1 and
a difference of two numbers of 8 nats: it rounds by 4 x 0.1 x 1e-6 nats.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from ranks import SHORT_RUN, TINY_GPT2, run_stages
from transformers import AutoTokenizer, GPT2Config

import evaluate
from common import noise
from common.config.parser import parse
from common.evaluation.config import EvaluateConfig
from common.record.jsonl import read_jsonl
from common.report import evaluation_report
from common.text import synthetic
from experiments import one_file
from experiments.one_file import Flags, Losses, Policy, RewardModel, Row
from experiments.stages import ROOT, config_class

pytestmark = pytest.mark.usefixtures("process_group", "without_pictures")

STEPS, NUM_ROWS = 5, 19  # in batches of 8 the third has 3 rows, in batches of 4 the fifth
COMMON = SHORT_RUN | {
    "num_train_rows": NUM_ROWS,
    "dataset_test_split": "",
    "max_completion_length": 48,
    "micro_batch_tokens": 300,
    "batch_size": 8,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "max_steps": STEPS,
}
OF_STAGE: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 3e-3},
    "reward": {"learning_rate": 3e-3, "sft_dataset_name": "synthetic", "num_sft_rows": 9},
    "dpo": {"learning_rate": 1e-3, "beta": 0.2},
    "grpo": {"learning_rate": 1e-3, "batch_size": 4, "rejection_method": "gumbel"},
}
FLAGS = Flags(max_completion_length=8, num_candidates=4, num_generations=3, num_prompts=8)
VARIANTS = {
    "two updates": replace(FLAGS, num_iterations=2),
    "normalised twice": replace(FLAGS, normalize_globally=True, rejection_temperature=4.0),
}
SAME_FLAGS = ("num_candidates", "num_generations", "num_iterations")
SAME_FLAGS += ("rejection_temperature", "normalize_globally")
# The first prompts, 19 in a row, in whose draws no uniform number is so near to that of another
# token: rounding of the probabilities moves it by 1e-6 or so
FIRST_PROMPT, NEAREST = 9, 5e-5


@dataclass
class Scripts:
    """The runs of the scripts."""

    folder: Path  # a run each, and `base`, the model they start from
    tokenizer: Any
    rollouts: dict[str, Any]  # completions by variant, and by "step S, row R"

    def rows(self, kind: str, first: int = 0, last: int = NUM_ROWS) -> list[Row]:
        rows = one_file.read_rows(self.tokenizer, Flags(), kind, "train", last)[first:]
        return [replace(row, number=row.number - first) for row in rows]

    def policy(self, name: str = "base") -> Policy:
        return Policy.from_pretrained(self.folder / name)

    def reward_model(self, name: str) -> RewardModel:
        """One whose shift is in the weights."""
        model = RewardModel.from_pretrained(self.folder / name)
        model.shift = 0.0
        return model

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / name / "metrics.jsonl")

    def check(self, name: str, log: list[dict[str, float]], **tolerances: float) -> None:
        """Compare metrics, with an absolute tolerance each, of a run with those of our steps."""
        lines = [line for line in self.lines(name) if "loss" in line]
        assert len(lines) == len(log) == STEPS
        for metric, tolerance in tolerances.items():
            expected, values = ([line[metric] for line in each] for each in (log, lines))
            assert values == pytest.approx(expected, rel=1e-5, abs=tolerance), metric
            assert len({*expected}) > 1


def train(
    name: str, model: Any, rows: list[Row], losses: Callable[..., Losses], flags: Flags = FLAGS
) -> list[dict[str, float]]:
    """The metrics of each update of a stage of the one file."""
    c = COMMON | OF_STAGE[name]
    recipe = (NUM_ROWS, c["batch_size"], STEPS, c["learning_rate"], c["warmup_steps"])
    recipe = (*recipe, c["adam_beta2"], c["weight_decay"])
    with mock.patch.dict(one_file.RECIPES, {name: recipe}):
        return one_file.train(name, model, rows, flags, losses)


def new_policy(tokenizer: Any) -> Policy:
    """The random weights of the scripts."""
    shape = {name: TINY_GPT2[name] for name in TINY_GPT2.keys() - {"model_type", "architectures"}}
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**shape, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0)
    torch.manual_seed(noise.derive_seed(0, "model initialisation"))
    return Policy(config)


def save_models(folder: Path, tokenizer: Any) -> None:
    """A policy that stops at about every tenth token, and a reward model: random weights."""
    sizes = {"vocab_size": len(tokenizer), "n_positions": 192, "is_plain": True}
    policy = tiny.causal_lm("gpt2", seed=1, **sizes)
    with torch.no_grad():
        policy.transformer.ln_f.bias += 2.0
        policy.transformer.wte.weight[one_file.STOP] = 0.1
    judge = tiny.classifier("gpt2", seed=2, pad_id=one_file.PAD, **sizes)
    for name, model in {"base": policy, "judge": judge}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@pytest.fixture(scope="module")
def scripts(
    tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path
) -> Iterator[Scripts]:
    """Every training script, in this process."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    scripts = Scripts(tmp_path_factory.mktemp("one_file"), tokenizer, {})
    save_models(scripts.folder, tokenizer)
    random = {"model_name_or_path": str(tiny_gpt2), "tokenizer_name_or_path": str(tokenizer_folder)}
    runs = {"sft": random, "reward": {}, "dpo": {}}
    for name, f in VARIANTS.items():
        runs[name] = {flag: getattr(f, flag) for flag in SAME_FLAGS} | {
            "max_completion_length": f.max_completion_length,
            "dataset_train_split": f"train[{FIRST_PROMPT}:{FIRST_PROMPT + NUM_ROWS}]",
            "reward_funcs": [str(scripts.folder / "judge")],
            "beta": f.kl_beta,
        }
    with tiny.process_group():
        for name, flags in runs.items():
            stage = "grpo" if name in VARIANTS else name
            paths = {"model_name_or_path": f"{scripts.folder}/base"}
            paths |= {"output_dir": f"{scripts.folder}/{name}"}
            (record,) = run_stages(
                [{"stage": stage, "flags": COMMON | OF_STAGE[stage] | paths | flags}]
            )
            scripts.rollouts[name] = record["rollouts"]
        yield scripts


def test_sft(scripts: Scripts) -> None:
    policy = new_policy(scripts.tokenizer)
    log = train("sft", policy, scripts.rows("sft"), lambda rows, _: one_file.sft(policy, rows))
    scripts.check("sft", log, loss=0, grad_norm=0)
    assert tiny.gradient_rounding(policy) / 10 < 1e-5


def test_reward_model(scripts: Scripts) -> None:
    model = one_file.new_reward_model(scripts.policy(), seed=0)
    pairs = scripts.rows("preference")
    log = train("reward", model, pairs, lambda rows, _: one_file.reward(model, rows))
    scripts.check("reward", log, loss=0, grad_norm=0, accuracy=0)
    rewards = one_file.score(one_file.completion_rewards, model, scripts.rows("sft", last=9))
    (shift,) = (line["reward_shift"] for line in scripts.lines("reward") if "reward_shift" in line)
    assert shift == pytest.approx(-float(rewards.mean()), rel=1e-5)
    assert abs(shift) > 0.01


def test_dpo(scripts: Scripts) -> None:
    policy, ref, pairs = scripts.policy(), scripts.policy(), scripts.rows("preference")
    f = Flags(dpo_beta=OF_STAGE["dpo"]["beta"])
    log = train("dpo", policy, pairs, lambda rows, _: one_file.dpo(policy, ref, rows, f))
    log[0]["accuracy"] = scripts.lines("dpo")[0]["accuracy"]  # of ties, but for rounding
    scripts.check("dpo", log, loss=0, grad_norm=0, accuracy=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_grpo(scripts: Scripts, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, ref, f = scripts.policy(), scripts.policy(), VARIANTS[variant]
    rm, sample, draw = scripts.reward_model("judge"), one_file.sample, one_file.draw
    rollouts: dict[str, Any] = {}

    def noted(policy: Policy, rows: list[Row], k: int, step: int, f: Flags) -> list[Row]:
        sampled = sample(policy, rows, k, step, f)
        for shift in (-NEAREST, NEAREST):
            with mock.patch.object(one_file, "draw", lambda x, u, by=shift: draw(x, u + by)):
                assert sample(policy, rows, k, step, f) == sampled, "near to another token"
        rollouts.update({f"step {step}, row {row.number}": row.completions for row in sampled})
        return sampled

    monkeypatch.setattr(one_file, "sample", noted)
    prompts = scripts.rows("prompts", FIRST_PROMPT, FIRST_PROMPT + NUM_ROWS)
    log = train("grpo", policy, prompts, lambda r, n: one_file.grpo(policy, ref, rm, r, n, f), f)
    log = [  # as the scripts', a line for each step
        {metric: fmean(line[metric] for line in log[i : i + f.num_iterations]) for metric in log[0]}
        for i in range(0, len(log), f.num_iterations)
    ]
    assert len(rollouts) == NUM_ROWS
    assert {key: scripts.rollouts[variant][key] for key in rollouts} == rollouts
    scripts.check(variant, log, loss=1e-5, grad_norm=0, kl=1e-6, reward=0)


@pytest.mark.usefixtures("few_resamples")
def test_evaluation(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts too short to state a fact: in the place of the gold reward is one of letters."""
    monkeypatch.setattr(evaluation_report, "write_report", lambda *_: [])
    monkeypatch.setattr(synthetic, "gold_reward", lambda text, facts: len({*text}) / 40)
    num_pairs, tokenizer = 48, scripts.tokenizer
    names = {"base": "base", "dpo": "dpo/model", "grpo": "two updates/model"}
    paths = {name: str(scripts.folder / path) for name, path in names.items()}
    flags: dict[str, Any] = {"reward_models": [str(scripts.folder / "reward/model")]}
    flags |= {"output_dir": str(scripts.folder / "evaluation"), "reward_funcs": ["gold"]}
    flags |= {"num_eval_rows": num_pairs, "num_prompts": FLAGS.num_prompts}
    flags |= {"max_prompt_length": 128, "max_completion_length": 48}
    flags |= {"max_new_tokens": FLAGS.max_completion_length, "micro_batch_tokens": 300}
    flags |= {"policy_scores": ["implicit_reward", "logp_per_token"]}
    evaluate.main(EvaluateConfig(policies=[*paths.values()], **flags))
    results = json.loads((scripts.folder / "evaluation/results.json").read_text())
    systems = {system["path"]: system for system in results["systems"]}
    by_score = {each["name"]: each["accuracy"] for each in results["comparison"]["systems"]}

    pairs = one_file.read_rows(tokenizer, Flags(), "preference", "validation", num_pairs)
    prompts = one_file.read_rows(tokenizer, Flags(), "prompts", "validation", FLAGS.num_prompts)
    ref, rm = scripts.policy(), scripts.reward_model("reward/model")
    rewards = one_file.score(one_file.completion_rewards, rm, pairs)
    accuracy = systems[flags["reward_models"][0]]["accuracy"]["accuracy"]
    assert accuracy == float((rewards[:, 0] > rewards[:, 1]).double().mean())
    seen = []
    for name, path in paths.items():
        policy, system = ref if name == "base" else scripts.policy(names[name]), systems[path]
        measures = one_file.evaluate(policy, ref, rm, pairs, prompts, tokenizer, FLAGS)
        means = {measure: float(values.double().mean()) for measure, values in measures.items()}
        assert means.pop("KL") == pytest.approx(system["kl"]["mean"], rel=1e-5, abs=1e-6)
        assert means == pytest.approx(
            {
                "accuracy": system["accuracy"]["accuracy"],
                "by logp/token": by_score[f"{system['name']} logp_per_token"]["accuracy"],
                "gold reward": system["gold_reward"]["mean"],
                "RM score": system["reward"]["mean"],
                "length": system["length"],
                "stop": system["stop_rate"],
            },
            rel=1e-5,
        )
        seen.append(means)
    assert len({tuple(means.values()) for means in seen}) == len(paths)


def test_the_defaults_are_the_demo_s() -> None:
    demo = ROOT / "assets/recipes/demo"
    configs = {}
    for stage, recipe in one_file.RECIPES.items():
        script = f"train_{stage}.py"
        configs[stage] = c = parse(config_class(script), ["--config", str(demo / f"{stage}.yaml")])
        num_rows = (
            c.num_train_rows or synthetic.DEFAULT_ROWS["sft" if stage == "sft" else "prompts"]
        )
        expected = (num_rows, c.batch_size, c.max_steps, c.learning_rate, c.warmup_steps)
        assert recipe == (*expected, c.adam_beta2, c.weight_decay)
        assert (c.lr_scheduler_type, c.min_lr, c.adam_beta1, c.max_grad_norm) == (
            "cosine",
            0,
            0.9,
            1,
        )
    grpo, f = configs["grpo"], Flags()
    assert (f.dpo_beta, f.kl_beta) == (configs["dpo"].beta, grpo.beta)
    assert configs["reward"].num_sft_rows == 512
    same = ("seed", "max_completion_length", *SAME_FLAGS)
    assert {flag: getattr(f, flag) for flag in same} == {flag: getattr(grpo, flag) for flag in same}


def test_the_command(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One step of every stage, on few rows."""
    recipes = dict.fromkeys(one_file.RECIPES, (8, 4, 2, 0.001, 1, 0.99, 0.0))
    monkeypatch.setattr(one_file, "RECIPES", recipes)
    monkeypatch.setattr(synthetic, "DEFAULT_ROWS", dict.fromkeys(synthetic.DEFAULT_ROWS, 8))
    monkeypatch.setattr(synthetic, "VALIDATION_ROWS", 8)
    monkeypatch.setattr(synthetic, "train_tokenizer", lambda: scripts.tokenizer)
    monkeypatch.setattr("sys.argv", ["one_file", "--num_prompts", "4", "--max_completion_length", "8"])
    monkeypatch.chdir(ROOT)
    one_file.main()
    head, *lines = capsys.readouterr().out.strip().splitlines()[-5:]
    assert [line.split()[0] for line in (head, *lines)] == ["stage", *one_file.RECIPES]
    assert [line.count("±") for line in lines] == [7, 1, 7, 7]
