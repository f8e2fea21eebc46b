"""Claim: the five scripts compute what `experiments/evidence/one_file.py` does, in plain PyTorch.

Five steps of SFT, reward model, DPO and GRPO from the same weights have the same loss, gradient
norm, accuracy and KL, and GRPO the same completions, token by token; `evaluate.py` has the same
table. The scripts run as they are used: under FSDP, in micro-batches, with a prompt computed once
for all its completions; without their self-checks, so that a mistake shows in the numbers.

Tolerances: two computations of a gradient are a tenth of `tiny.gradient_rounding` apart at most,
which is 1e-5 of its norm here; a loss has fewer roundings. GRPO's loss, KL and reward and the cells
of the table are means of numbers of about 1 and may be near 0: 1e-6 more, 16 roundings of 1. About
`experiments.evidence.one_file`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from common.config.evaluate import EvaluateConfig
from common.config.parser import parse
from common.record.jsonl import read_jsonl
from common.report import evaluation_report
from common.text import synthetic
from experiments.evidence import one_file
from experiments.evidence.one_file import Flags, Losses, Policy, RewardModel, Row
from experiments.runs.stages import ROOT, config_class

pytestmark = pytest.mark.usefixtures("process_group", "without_pictures")

STEPS, NUM_ROWS = 5, 19  # in batches of 8 the third has 3 rows, in batches of 4 the fifth
COMMON = SHORT_RUN | {
    "num_train_rows": NUM_ROWS,
    "dataset_test_split": "",
    "self_check": False,
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
    """The scripts' runs, each made when it is asked for."""

    folder: Path  # a run each, and the models that they start from
    tokenizer: Any
    flags: dict[str, dict[str, Any]]  # by run
    rollouts: dict[str, Any] = field(default_factory=dict)  # by run, and by "step S, row R"

    def run(self, name: str) -> list[dict[str, Any]]:
        if name not in self.rollouts:
            stage = "grpo" if name in VARIANTS else name
            paths = {"model_name_or_path": f"{self.folder}/base"}
            paths |= {"output_dir": f"{self.folder}/{name}"}
            flags = COMMON | OF_STAGE[stage] | paths | self.flags[name]
            (record,) = run_stages([{"stage": stage, "flags": flags}])
            self.rollouts[name] = record["rollouts"]
        return read_jsonl(self.folder / name / "metrics.jsonl")

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

    def check(self, name: str, log: list[dict[str, float]], *metrics: str, abs: float = 0) -> None:
        lines = [line for line in self.run(name) if "loss" in line]
        assert len(lines) == len(log) == STEPS
        for metric in ("loss", "grad_norm", *metrics):
            expected, values = ([line[metric] for line in each] for each in (log, lines))
            assert values == pytest.approx(expected, rel=1e-5, abs=abs), metric
            assert len({*expected}) > 1


def train(
    name: str, model: Any, rows: list[Row], losses: Callable[..., Losses], flags: Flags = FLAGS
) -> list[dict[str, float]]:
    flag = COMMON | OF_STAGE[name]
    optimiser = [flag[key] for key in ("learning_rate", "warmup_steps", "adam_beta2")]
    recipe = (NUM_ROWS, flag["batch_size"], STEPS, *optimiser, flag["weight_decay"])
    with mock.patch.dict(one_file.RECIPES, {name: recipe}):
        return one_file.train(name, model, rows, flags, losses)


def new_policy(tokenizer: Any) -> Policy:
    shape = {name: TINY_GPT2[name] for name in TINY_GPT2.keys() - {"model_type", "architectures"}}
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(noise.derive_seed(0, "model initialisation"))
    return Policy(GPT2Config(**shape, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0))


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
) -> Scripts:
    folder = tmp_path_factory.mktemp("one_file")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    save_models(folder, tokenizer)
    random = {"model_name_or_path": str(tiny_gpt2), "tokenizer_name_or_path": str(tokenizer_folder)}
    flags: dict[str, dict[str, Any]] = {"sft": random, "reward": {}, "dpo": {}}
    for name, f in VARIANTS.items():
        flags[name] = {flag: getattr(f, flag) for flag in SAME_FLAGS} | {
            "max_completion_length": f.max_completion_length,
            "dataset_train_split": f"train[{FIRST_PROMPT}:{FIRST_PROMPT + NUM_ROWS}]",
            "reward_funcs": [str(folder / "judge")],
            "beta": f.kl_beta,
        }
    return Scripts(folder, tokenizer, flags)


def test_sft(scripts: Scripts) -> None:
    policy = new_policy(scripts.tokenizer)
    log = train("sft", policy, scripts.rows("sft"), lambda rows, _: one_file.sft(policy, rows))
    scripts.check("sft", log)
    assert tiny.gradient_rounding(policy) / 10 < 1e-5


def test_reward_model(scripts: Scripts) -> None:
    model = one_file.new_reward_model(scripts.policy(), seed=0)
    pairs = scripts.rows("preference")
    log = train("reward", model, pairs, lambda rows, _: one_file.reward(model, rows))
    scripts.check("reward", log, "accuracy")
    rewards = one_file.score(one_file.completion_rewards, model, scripts.rows("sft", last=9))
    (shift,) = (line["reward_shift"] for line in scripts.run("reward") if "reward_shift" in line)
    assert shift == pytest.approx(-float(rewards.mean()), rel=1e-5)
    assert abs(shift) > 0.01


def test_dpo(scripts: Scripts) -> None:
    policy, ref, pairs = scripts.policy(), scripts.policy(), scripts.rows("preference")
    f = Flags(dpo_beta=OF_STAGE["dpo"]["beta"])
    log = train("dpo", policy, pairs, lambda rows, _: one_file.dpo(policy, ref, rows, f))
    log[0]["accuracy"] = scripts.run("dpo")[0]["accuracy"]  # of ties, but for rounding
    scripts.check("dpo", log, "accuracy")


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
    scripts.run(variant)
    assert {key: scripts.rollouts[variant][key] for key in rollouts} == rollouts
    scripts.check(variant, log, "kl", "reward", abs=1e-6)


@pytest.mark.usefixtures("few_resamples")
def test_evaluation(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts too short to state a fact: in the place of the gold reward is one of letters."""
    monkeypatch.setattr(evaluation_report, "write_report", lambda *_: [])
    monkeypatch.setattr(synthetic, "gold_reward", lambda text, facts: len({*text}) / 40)
    for run in ("reward", "dpo", "two updates"):
        scripts.run(run)
    num_pairs, tokenizer = 48, scripts.tokenizer
    names = {"base": "base", "dpo": "dpo/model", "grpo": "two updates/model"}
    paths = {name: str(scripts.folder / path) for name, path in names.items()}
    flags: dict[str, Any] = {"reward_models": [str(scripts.folder / "reward/model")]}
    flags |= {"output_dir": str(scripts.folder / "evaluation"), "reward_funcs": ["gold"]}
    flags |= {"num_eval_rows": num_pairs, "num_prompts": FLAGS.num_prompts}
    flags |= {"max_prompt_length": 128, "max_completion_length": 48}
    flags |= {"max_new_tokens": FLAGS.max_completion_length, "micro_batch_tokens": 300}
    flags |= {"policy_scores": ["implicit_reward", "logp_per_token"], "self_check": False}
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
        expected = {
            "accuracy": system["accuracy"]["accuracy"],
            "by logp/token": by_score[f"{system['name']} logp_per_token"]["accuracy"],
            "gold reward": system["gold_reward"]["mean"],
            "reward": system["reward"]["mean"],
            "KL": system["kl"]["mean"],
            "length": system["length"],
            "stop": system["stop_rate"],
        }
        assert means == pytest.approx(expected, rel=1e-5, abs=1e-6)
        seen.append(means)
    assert len({tuple(means.values()) for means in seen}) == len(paths)


def test_the_defaults_are_the_demo_s() -> None:
    recipes, f, configs = ROOT / "assets/recipes/demo", Flags(), {}
    model = json.loads((recipes / "gpt2-tiny.json").read_text())
    assert model == one_file.SHAPE | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    all_rows = {"sft": synthetic.DEFAULT_ROWS["sft"], "grpo": synthetic.DEFAULT_ROWS["prompts"]}
    for stage, (num_rows, *recipe) in one_file.RECIPES.items():
        argv = ["--config", str(recipes / f"{stage}.yaml")]
        configs[stage] = demo = parse(config_class(f"train_{stage}.py"), argv)
        assert num_rows == (demo.num_train_rows or all_rows[stage])
        steps = [demo.batch_size, demo.max_steps, demo.learning_rate, demo.warmup_steps]
        assert recipe == [*steps, demo.adam_beta2, demo.weight_decay]
        assert (demo.lr_scheduler_type, demo.min_lr) == ("cosine", 0)
        assert demo.max_grad_norm == 1
    assert (f.dpo_beta, f.kl_beta) == (configs["dpo"].beta, configs["grpo"].beta)
    assert (configs["reward"].num_sft_rows, configs["dpo"].loss_type) == (512, ["sigmoid"])
    grpo = vars(configs["grpo"])
    fixed = {"baseline": "all", "rejection_method": "gumbel", "missing_eos_penalty": -1.0}
    fixed |= {"penalize_missing_eos": True, "reward_weights": [1.0, 0.0], "temperature": 1.0}
    fixed |= {"kl_estimator": "k3", "policy_objective": ["clip"], "advantages": "group"}
    fixed |= {"aggregation": "grpo", "num_minibatches": 1}
    assert {name: grpo[name] for name in fixed} == fixed
    rows = synthetic.make_rows("prompts", "train")
    tokenizer = synthetic.train_tokenizer()
    longest = max(len(tokenizer(row["prompt"]).input_ids) for row in rows)
    assert longest <= configs["grpo"].max_prompt_length, "the one file cuts no prompt"
    for name in ("seed", "max_completion_length", *SAME_FLAGS):
        assert getattr(f, name) == getattr(configs["grpo"], name), name


def test_the_command(scripts, monkeypatch, capsys):
    """Two steps of every stage, on few rows."""
    recipes = dict.fromkeys(one_file.RECIPES, (8, 4, 2, 0.001, 1, 0.99, 0.0))
    monkeypatch.setattr(one_file, "RECIPES", recipes)
    monkeypatch.setattr(synthetic, "DEFAULT_ROWS", dict.fromkeys(synthetic.DEFAULT_ROWS, 8))
    monkeypatch.setattr(synthetic, "VALIDATION_ROWS", 8)
    monkeypatch.setattr(synthetic, "train_tokenizer", lambda: scripts.tokenizer)
    flags = ["--num_prompts", "4", "--max_completion_length", "8"]
    monkeypatch.setattr("sys.argv", ["one_file", *flags])
    one_file.main()
    head, *lines = capsys.readouterr().out.strip().splitlines()[-5:]
    assert [line.split()[0] for line in (head, *lines)] == ["stage", *one_file.RECIPES]
    assert [line.count("±") for line in lines] == [7, 1, 7, 7]


def test_the_command_takes_the_first_steps_and_refuses_a_wrong_flag(scripts, monkeypatch, capsys):
    rows = one_file.read_rows(scripts.tokenizer, Flags(), "sft", "train", 32)
    monkeypatch.setitem(one_file.RECIPES, "sft", (32, 4, 5, 1e-3, 1, 0.99, 0.0))
    logs = []
    for steps in (0, 2, 9):
        policy = new_policy(scripts.tokenizer)
        log = one_file.train(
            "sft", policy, rows, Flags(steps=steps), lambda r, _, p=policy: one_file.sft(p, r)
        )
        logs.append(log)
    assert [len(log) for log in logs] == [5, 2, 5]
    assert logs[0][:2] == logs[1]
    assert "sft 2" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["one_file", "--stops", "2"])
    with pytest.raises(SystemExit, match="2"):
        one_file.main()
    assert "unrecognized arguments: --stops 2" in capsys.readouterr().err
