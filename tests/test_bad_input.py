"""Claim: what a user gets wrong ends in one clear sentence, before any weights are read.

The sentence names the value and the field to change, the exit status is 2, and the folder of the
run is not even made. Most cases call a stage in this process, with loading weights forbidden; some
run it as a user does, alone and under torchrun, where the sentence is printed once.
"""

import gzip
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    T5Config,
)

from common import distributed, models, synthetic
from common.config import UserError, parse

ROOT = Path(__file__).resolve().parents[1]
STAGES = {
    "train_sft": "SFTConfig",
    "train_reward": "RewardConfig",
    "train_dpo": "DPOConfig",
    "train_grpo": "GRPOConfig",
    "evaluate": "EvaluateConfig",
}
SFT = {"prompt": "TITLE: a\n\nPOST: b\n\nTL;DR:", "completion": " c"}
PAIR = {"prompt": SFT["prompt"], "chosen": " c", "rejected": " d"}
BAD_ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [SFT] * 4,
    "pairs": [PAIR] * 4,
    "no_completion": [{"prompt": "p"}],
    "number": [SFT, {**SFT, "completion": 3}],
    "none": [],
    "empty_completion": [SFT, {**SFT, "completion": ""}],
    "messages": [{**SFT, "prompt": [{"role": "user", "content": "p"}]}],
    "equal_pairs": [PAIR, {**PAIR, "chosen": " d"}],
    "only_newlines": [{**SFT, "completion": " \n"}],
    "ragged": [{"prompt": "p"}, {"prompt": "p", "length": 3}],
    "choice": [{"prompt": "p", "reward_funcs": ["gold", "silver"]}],
}
REWARD_FILE = """
def lengths(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def strict(prompts, completions, completion_ids, *, grade, **columns):
    return grade

constant = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working directory with models, data sets, a reward file, a recipe; with a process group."""
    folder = tmp_path_factory.mktemp("bad_input")
    tokenizer = synthetic.train_tokenizer(300)
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 64, "vocab_size": 300}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(folder / "policy")
    classifier = GPT2Config(**shape, num_labels=1, pad_token_id=1)
    GPT2ForSequenceClassification(classifier).save_pretrained(folder / "judge")
    classifier.num_labels = 2
    GPT2ForSequenceClassification(classifier).save_pretrained(folder / "two_scores")
    GPT2LMHeadModel(GPT2Config(**shape | {"vocab_size": 7})).save_pretrained(folder / "few_words")
    T5Config().save_pretrained(folder / "t5")
    for name in ("no_weights", "pointer", "partial"):
        GPT2Config(**shape).save_pretrained(folder / name)
    # What git leaves of a large file without its LFS extension
    (folder / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com\n")
    save_file({"wte.weight": torch.zeros(300, 8)}, folder / "partial" / "model.safetensors")
    for name in ("policy", "judge", "few_words", "two_scores", "words", "old_run/model"):
        tokenizer.save_pretrained(folder / name)
    for name in ("t5", "no_weights", "pointer", "partial"):
        tokenizer.save_pretrained(folder / name)
    (folder / "shape.json").write_text(json.dumps({"model_type": "gpt2", **shape}))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "no_eos")
    for name, rows in BAD_ROWS.items():
        (folder / name).mkdir()
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / name / "train.jsonl").write_text(text)
    (folder / "both").mkdir()
    for split in ("train", "validation"):
        (folder / "both" / f"{split}.jsonl").write_text(f"{json.dumps(SFT)}\n" * 4)
    (folder / "broken.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "p"}\n' * 99)[:40])
    (folder / "rewards.py").write_text(REWARD_FILE)
    (folder / "raises.py").write_text("raise OSError('no disk')\n")
    (folder / "a_file").write_text("")
    with tiny.working_directory(folder):
        yield folder


BASE = {
    "output_dir": "run",
    "model_name_or_path": "policy",
    "dataset_test_split": "",
    "max_prompt_length": 40,
    "max_completion_length": 20,
    "batch_size": 2,
    "max_steps": 1,
}
DATA = {"train_sft": "sft", "train_grpo": "sft"}  # the others read pairs


def arguments(stage: str, flags: dict[str, Any]) -> list[str]:
    """A command line that runs, but for the flags given."""
    values = {**BASE, "dataset_name": DATA.get(stage, "pairs")}
    if stage == "train_grpo":
        values["reward_funcs"] = "rewards.py:lengths"
    if stage == "evaluate":
        values = {**values, "policies": "policy", "dataset_test_split": "train"}
        values = {k: v for k, v in values.items() if k not in ("batch_size", "max_steps")}
    argv = []
    for name, value in (values | flags).items():
        argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv


def refusal(stage: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which a stage refuses a command line."""
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("weights were loaded"))
    module = importlib.import_module(stage)
    with pytest.raises(UserError) as caught:
        module.main(parse(getattr(module, STAGES[stage]), argv))
    assert not Path("run").exists()
    return str(caught.value)


def check_sentence(message: str) -> None:
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 400
    assert "Traceback" not in message
    assert message.count(". ") == 0, "more than one sentence"


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    # Rows
    ("train_sft", {"dataset_name": "no_completion"}, ["row 1", "'completion' is missing"]),
    ("train_sft", {"dataset_name": "pairs"}, ["'completion' is missing", "'chosen'"]),
    ("train_dpo", {"dataset_name": "sft"}, ["'chosen' is missing"]),
    ("train_reward", {"dataset_name": "sft"}, ["'chosen' is missing"]),
    ("evaluate", {"dataset_name": "sft"}, ["'chosen' is missing"]),
    ("train_sft", {"dataset_name": "number"}, ["row 2", "'completion'", "holds int", "text"]),
    ("train_sft", {"dataset_name": "none"}, ["train.jsonl has no rows"]),
    ("train_sft", {"dataset_name": "empty_completion"}, ["row 2", "'completion' is empty"]),
    ("train_sft", {"dataset_name": "only_newlines"}, ["row 1", "'completion' is empty"]),
    (
        "train_sft",
        {"dataset_name": "messages"},
        ["'completion'", "both be text or both be"],
    ),
    ("train_dpo", {"dataset_name": "equal_pairs"}, ["1 of 2 rows", "1 identical pair"]),
    ("train_sft", {"dataset_name": "broken.jsonl.gz"}, ["broken.jsonl.gz cannot be read"]),
    ("train_sft", {"dataset_name": "nowhere/x/y"}, ["'nowhere/x/y' does not exist"]),
    ("train_sft", {"dataset_name": ""}, ["--dataset_name is empty"]),
    ("train_sft", {"dataset_train_split": "test"}, ["'test'", "train.jsonl"]),
    ("train_sft", {"dataset_train_split": ""}, ["--dataset_train_split is empty"]),
    ("train_sft", {"dataset_test_split": "validation"}, ["'validation'", "train.jsonl"]),
    ("train_sft", {"max_prompt_length": 5}, ["4 of 4 rows", "prompt over max_prompt_length"]),
    # Models and tokenizers
    ("train_sft", {"model_name_or_path": "./nowhere"}, ["'./nowhere' does not exist"]),
    ("train_sft", {"model_name_or_path": "pairs"}, ["folder 'pairs' holds no tokenizer"]),
    ("train_sft", {"model_name_or_path": "old_run"}, ["'old_run'", "its subfolder 'model'"]),
    ("train_sft", {"model_name_or_path": "no_eos"}, ["'no_eos'", "no eos token"]),
    ("train_sft", {"model_name_or_path": "words"}, ["folder 'words' holds no model"]),
    ("train_sft", {"model_name_or_path": "shape.json"}, ["--tokenizer_name_or_path is required"]),
    ("train_sft", {"tokenizer_name_or_path": "no_eos"}, ["'no_eos'", "no eos token"]),
    ("train_sft", {"model_name_or_path": "few_words"}, ["300 tokens", "'few_words'", "7"]),
    ("train_sft", {"model_name_or_path": "judge"}, ["'judge' is a reward model"]),
    ("train_sft", {"model_name_or_path": "t5"}, ["'t5' is a t5 model", "causal language model"]),
    ("train_reward", {"model_name_or_path": "t5"}, ["'t5' is a t5 model"]),
    ("train_dpo", {"ref_model_name_or_path": "judge"}, ["'judge' is a reward model"]),
    ("train_grpo", {"ref_model_name_or_path": "judge"}, ["'judge' is a reward model"]),
    ("train_grpo", {"reward_funcs": "policy"}, ["'policy' is not a reward model", "GPT2LMHead"]),
    ("evaluate", {"policies": "judge"}, ["'judge' is a reward model"]),
    ("evaluate", {"reward_models": "policy"}, ["'policy' is not a reward model"]),
    ("evaluate", {"reward_models": "two_scores"}, ["'two_scores' gives 2 scores"]),
    ("train_reward", {"model_name_or_path": "two_scores"}, ["'two_scores' gives 2 scores"]),
    ("train_sft", {"seed": 2**63}, ["--seed is 9223372036854775808", "below"]),
    ("train_sft", {"seed": -1}, ["--seed is -1", "at least 0"]),
    ("evaluate", {"reward_models": ["judge", "far/away"]}, ["no model", "'far/away'"]),
    ("train_sft", {"max_prompt_length": 60}, ["--max_prompt_length 60", "64 positions"]),
    ("train_grpo", {"max_completion_length": 60}, ["--max_completion_length 60", "64 positions"]),
    ("evaluate", {"max_prompt_length": 60}, ["--max_prompt_length 60", "64 positions"]),
    ("train_sft", {"stop_token": "TL;DR:"}, ["--stop_token 'TL;DR:' is", "tokens"]),
    ("train_sft", {"stop_token": ""}, ["--stop_token '' is 0 tokens"]),
    # Rewards
    ("train_grpo", {"reward_funcs": "silver.py:f"}, ["'silver.py:f'", "no file 'silver.py'"]),
    ("train_grpo", {"reward_funcs": "./silver"}, ["'./silver'", "no folder", "gold"]),
    ("train_grpo", {"reward_funcs": "rewards.py"}, ["'rewards.py'", "path/to/file.py:function"]),
    ("train_grpo", {"reward_funcs": "rewards.py:best"}, ["'rewards.py:best'", "no function"]),
    ("train_grpo", {"reward_funcs": "rewards.py:constant"}, ["no function of that name"]),
    ("train_grpo", {"reward_funcs": "count"}, ["'count'", "count:<argument>"]),
    ("train_grpo", {"reward_funcs": "regex:(a"}, ["regex:(a", "no pattern", "unterminated"]),
    ("train_grpo", {"reward_funcs": "gsm8k"}, ["'gsm8k' needs the column 'answer'"]),
    ("train_grpo", {"reward_funcs": "rouge_l:short"}, ["needs the column 'short'"]),
    ("train_grpo", {"reward_funcs": "rewards.py:strict"}, ["'rewards.py:strict'", "'grade'"]),
    ("train_grpo", {"reward_funcs": "raises.py:f"}, ["OSError", "no disk"]),
    ("train_grpo", {"reward_funcs": "gold"}, ["'gold' needs the column 'facts'"]),
    ("train_grpo", {"reward_funcs": []}, ["--reward_funcs is required"]),
    ("train_grpo", {"reward_funcs": ["gold", "gold"]}, ["'gold' twice"]),
    ("train_grpo", {"reward_weights": [1, 2]}, ["reward_weights is [1.0, 2.0]", "1 finite"]),
    ("train_grpo", {"dataset_name": "ragged"}, ["row 2", "['length']", "row 1"]),
    ("train_grpo", {"dataset_name": "choice"}, ["row 1", "'gold'", "--reward_funcs has"]),
    ("evaluate", {"reward_funcs": "gold"}, ["'gold' needs the column 'facts'"]),
    # Sizes and choices
    ("train_grpo", {"num_generations": 1}, ["--num_generations is 1", "at least 2"]),
    ("train_grpo", {"num_candidates": 4}, ["--num_generations is 8 of 4 candidates"]),
    ("train_grpo", {"temperature": 0}, ["--temperature is 0.0", "positive"]),
    ("train_grpo", {"beta": -0.1}, ["--beta is -0.1", "0 or more"]),
    ("train_grpo", {"epsilon_low": -0.1}, ["--epsilon_low is -0.1", "0 or more"]),
    ("train_grpo", {"baseline": "none"}, ["--baseline", "'none'", "all", "kept"]),
    ("train_dpo", {"beta": 0}, ["--beta is 0.0", "positive"]),
    ("train_dpo", {"label_smoothing": 0.5}, ["--label_smoothing is 0.5", "below 0.5"]),
    ("train_sft", {"batch_size": -4}, ["--batch_size is -4", "positive"]),
    ("train_sft", {"batch_size": 0}, ["--batch_size is 0", "positive"]),
    ("train_sft", {"micro_batch_size": 0}, ["--micro_batch_size is 0", "positive"]),
    ("train_sft", {"max_completion_length": -1}, ["--max_completion_length is -1", "positive"]),
    ("train_sft", {"num_train_rows": -1}, ["--num_train_rows is -1", "0 or more"]),
    ("train_sft", {"max_steps": 0, "num_train_epochs": 0}, ["--num_train_epochs is 0.0"]),
    ("train_sft", {"max_steps": 0, "num_train_epochs": "nan"}, ["--num_train_epochs is nan"]),
    ("train_sft", {"learning_rate": "nan"}, ["--learning_rate is nan"]),
    ("train_sft", {"learning_rate": "inf"}, ["--learning_rate is inf", "finite"]),
    ("train_sft", {"max_grad_norm": "nan"}, ["--max_grad_norm is nan"]),
    ("train_sft", {"adam_beta1": 1}, ["--adam_beta1 is 1.0", "below 1"]),
    ("train_sft", {"weight_decay": -1}, ["--weight_decay is -1.0", "0 or more"]),
    ("train_sft", {"max_dropped_fraction": 2}, ["--max_dropped_fraction is 2.0", "[0, 1]"]),
    ("train_sft", {"num_replicas": 2}, ["--num_replicas is 2", "1 processes"]),
    ("train_sft", {"lr_scheduler_type": "foo"}, ["--lr_scheduler_type", "'foo'", "cosine"]),
    ("train_sft", {"report_to": "paper"}, ["--report_to", "'paper'", "wandb"]),
    ("train_sft", {"prompt_truncation": "end"}, ["--prompt_truncation", "'end'", "tldr"]),
    ("evaluate", {"max_new_tokens": 21}, ["--max_new_tokens is 21", "--max_completion_length, 20"]),
    ("evaluate", {"policies": []}, ["nothing to evaluate"]),
    ("evaluate", {"dataset_test_split": ""}, ["--dataset_test_split is required"]),
    # Folders
    ("train_sft", {"output_dir": ""}, ["--output_dir is required"]),
    ("train_sft", {"output_dir": "a_file"}, ["--output_dir a_file is a file"]),
    ("train_sft", {"model_name_or_path": ""}, ["--model_name_or_path is required"]),
    ("train_sft", {"resume_from_checkpoint": "run/gone"}, ["--resume_from_checkpoint run/gone"]),
    # The command line
    ("train_sft", {"learning_rte": 1}, ["'--learning_rte'", "did you mean learning_rate?"]),
    ("train_sft", {"max_step": 1}, ["'--max_step'", "did you mean max_steps?"]),
    ("train_sft", {"zzz": 1}, ["'--zzz'", "--help"]),
    ("train_sft", {"max_steps": "many"}, ["--max_steps", "'many'"]),
    ("train_sft", {"max_steps": 1.5}, ["--max_steps", "'1.5'"]),
    ("train_sft", {"learning_rate": "fast"}, ["--learning_rate", "'fast'"]),
    ("train_sft", {"bf16": "perhaps"}, ["--bf16", "perhaps", "true/false"]),
    ("train_sft", {"max_steps": []}, ["--max_steps", "expected one argument"]),
    ("train_sft", {"batch_size": [1, 2]}, ["'2'", "--help"]),
]


@pytest.mark.parametrize(
    ("stage", "flags", "parts"),
    CASES,
    ids=[" ".join([stage, *(f"{k}={v}" for k, v in flags.items())]) for stage, flags, _ in CASES],
)
def test_bad_input_is_refused_in_one_sentence(stage, flags, parts, folder, monkeypatch):
    message = refusal(stage, arguments(stage, flags), monkeypatch)
    check_sentence(message)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("stage", ["train_sft", "train_reward"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("no_weights", ["no safetensors weights", "'no_weights'"]),
        ("pointer", ["no safetensors weights", "'pointer'"]),
        ("partial", ["the weights of 'partial' lack", "other parameters"]),
    ],
)
def test_weights_that_cannot_be_used_are_refused(stage, name, parts, folder):
    module = importlib.import_module(stage)
    argv = arguments(stage, {"model_name_or_path": name})
    with pytest.raises(UserError) as caught:
        module.main(parse(getattr(module, STAGES[stage]), argv))
    check_sentence(str(caught.value))
    for part in parts:
        assert part in str(caught.value)
    assert not Path("run").exists()


def test_the_good_input_is_not_refused(folder, monkeypatch):
    """The control: without the bad value every stage goes on to load weights."""
    monkeypatch.setattr(models, "load", lambda *_: (_ for _ in ()).throw(InterruptedError))
    for stage, name in STAGES.items():
        module = importlib.import_module(stage)
        with pytest.raises(InterruptedError):
            module.main(parse(getattr(module, name), arguments(stage, {"output_dir": "good"})))


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("learning_rte: 1\n", ["r.yaml", "key 'learning_rte'", "mean learning_rate?"]),
        ("max_steps: many\n", ["--max_steps", "'many'"]),
        ("max_steps: [1, 2]\n", ["r.yaml", "[1, 2]", "'max_steps'"]),
        ("max_steps: {a: 1}\n", ["r.yaml", "'max_steps'"]),
        ("max_steps:\n", ["r.yaml", "'max_steps'"]),
        ("bf16: 3.5\n", ["3.5"]),
        ("a: [1\nb: 2\n", ["r.yaml is not YAML: line 2, "]),
        ("max_steps\n", ["r.yaml", "`key: value`"]),
        ("- max_steps\n", ["r.yaml", "`key: value`"]),
        ("\ttab: 1\n", ["r.yaml is not YAML: line 1, "]),
    ],
)
def test_a_bad_recipe_is_refused_in_one_sentence(recipe, parts, folder, monkeypatch):
    Path("r.yaml").write_text(recipe)
    argv = ["--config", "r.yaml", *arguments("train_sft", {})]
    message = refusal("train_sft", argv, monkeypatch)
    check_sentence(message)
    for part in parts:
        assert part in message


def test_a_recipe_that_is_not_there_or_not_named(folder, monkeypatch):
    message = refusal("train_sft", ["--config", "gone.yaml"], monkeypatch)
    check_sentence(message)
    assert "gone.yaml cannot be read: No such file" in message
    message = refusal("train_sft", ["--config"], monkeypatch)
    check_sentence(message)
    assert "--config: expected one argument" in message
    Path("r.yaml").write_bytes(b"\xff\xfe\x00")
    message = refusal("train_sft", ["--config", "r.yaml"], monkeypatch)
    check_sentence(message)
    assert "r.yaml is not YAML" in message


def test_only_rank_0_speaks_unless_it_has_nothing_to_say(monkeypatch, capsys):
    """A refused rank waits for rank 0's sentence, after which torchrun ends it; then speaks."""
    events: list[Any] = []

    def leave(status: int) -> None:
        events.append(status)
        raise SystemExit(status)

    def sleep(seconds: float) -> None:
        assert not capsys.readouterr().err, "it spoke at once"
        events.append(seconds)

    monkeypatch.setattr(sys, "argv", ["train_sft.py", "--nonsense"])
    monkeypatch.setattr(distributed, "close_and_exit", leave)
    monkeypatch.setattr(time, "sleep", sleep)
    config_class = importlib.import_module("train_sft").SFTConfig
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            distributed.run(lambda config: pytest.fail("it ran"), config_class)
        assert "error: unknown argument '--nonsense'" in capsys.readouterr().err
    assert events == [2, distributed.REFUSED_ALONE_AFTER, 2]


def run_script(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A stage as a user starts it; the hub does not answer at the address it is given."""
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **offline},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"max_stepz": 1}, "unknown argument '--max_stepz' (did you mean max_steps?)."),
        ({"model_name_or_path": "no/body"}, "no tokenizer could be loaded from 'no/body': "),
        ({"dataset_name": "no/body"}, "dataset_name 'no/body' (split 'train') is no local "),
    ],
)
def test_a_script_prints_the_sentence_alone_and_exits_with_2(flags, sentence, folder):
    result = run_script([str(ROOT / "train_sft.py"), *arguments("train_sft", flags)])
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()  # nor does a library say that it tries again
    assert line.startswith(f"error: {sentence}")
    check_sentence(line)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"batch_size": 3}, "--batch_size is 3, which 2 processes cannot share evenly; "),
        ({"max_stepz": 1}, "unknown argument '--max_stepz' (did you mean max_steps?)."),
    ],
)
def test_two_processes_print_the_sentence_once(flags, sentence, folder):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = str(ROOT / "train_sft.py")
    result = run_script([*torchrun, script, *arguments("train_sft", flags)])
    assert result.returncode != 0
    assert result.stderr.count(f"error: {sentence}") == 1
    assert "failed:" not in result.stderr.split("error: ")[0]
    assert not Path("run").exists()
