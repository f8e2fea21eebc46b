"""Claim: the mistakes that users make end in one clear sentence and the exit status 2.

Nothing has been written by then. `MISTAKES` runs the stages as a user does, but in this process;
some run as real commands. The malformed things themselves are in `mistakes.py`. About
`common.errors` and `common.config.parser`.
"""

import gzip
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import mistakes
import pytest
import tiny
import torch
from mistakes import STAGES, Refusals, arguments
from ranks import ROOT, environment
from safetensors.torch import load_file, save_file

from common import self_checks
from common.config.grpo import GRPOConfig
from common.config.parser import parse
from common.errors import UserError, why_missing
from common.model import load
from common.record import output_lock
from common.record.jsonl import read_jsonl
from common.sampling.sampler import Sampler
from experiments.runs.stages import config_class

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mistakes.working_folder(tmp_path_factory.mktemp("mistakes")) as folder:
        yield folder


@pytest.fixture
def refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refusals:
    return Refusals(monkeypatch, capsys)


CHATML = {"model_name_or_path": "chatml"}
SYSTEM = CHATML | {"dataset_name": "system"}
MISTAKES: list[tuple[str, dict[str, Any], list[str]]] = [  # stage, flags, parts of the sentence
    # Paths
    ("train_sft", {"output_dir": ""}, ["--output_dir is required"]),
    ("train_sft", {"output_dir": "typo.json/run"}, ["typo.json is no folder"]),
    (
        "train_sft",
        {"output_dir": "old_run", "model_name_or_path": "old_run/model"},
        ["--model_name_or_path is old_run/model", "would write to"],
    ),
    ("train_sft", {"resume_from_checkpoint": "run/gone"}, ["--resume_from_checkpoint run/gone"]),
    ("train_sft", {"dataset_name": "gone.jsonl"}, ["'gone.jsonl' does not exist"]),
    ("train_sft", {"dataset_name": "assets/recipes"}, ["does not exist", "repository's root, "]),
    ("train_sft", {"config": "assets/recipes/demo/sft.yaml"}, ["No such", "repository's root, "]),
    ("train_sft", {"dataset_train_split": "test"}, ["'test'", "train.jsonl"]),
    ("train_sft", {"dataset_name": "data/gsm8k/rows"}, ["exist; where a recipe", "make_rows.py"]),
    ("train_sft", {"model_name_or_path": "./nowhere"}, ["'./nowhere' does not exist"]),
    ("train_sft", {"model_name_or_path": "old_run"}, ["'old_run'", "its subfolder 'model'"]),
    ("train_sft", {"model_name_or_path": "saved_run"}, ["'saved_run/checkpoints/step_00000009'"]),
    (
        "train_dpo",
        {"ref_model_name_or_path": "out/sft_2/model"},
        ["'out/sft_2/model'", "train_sft.py with --output_dir out/sft_2 writes it"],
    ),
    (
        "evaluate",
        {"policies": "policy", "reward_models": "output/mine/model"},
        ["'output/mine/model'", "a training script with --output_dir output/mine writes it"],
    ),
    ("train_grpo", {"reward_funcs": "silver.py:f"}, ["no file 'silver.py'"]),
    ("train_grpo", {"reward_funcs": "rewards.py"}, ["'rewards.py'", "path/to/file.py:function"]),
    ("train_grpo", {"reward_funcs": "rewards.py:best"}, ["'rewards.py:best'", "no function"]),
    ("train_grpo", {"reward_funcs": "silver"}, ["'silver'", "no folder", "gold"]),
    # Models and tokenizers
    ("train_sft", {"model_name_or_path": "shape.json"}, ["--tokenizer_name_or_path is required"]),
    (
        "train_sft",
        {"model_name_or_path": "typo.json", "tokenizer_name_or_path": "policy"},
        ["'typo.json' has 'n_layr'", "no gpt2 has"],
    ),
    ("train_sft", {"model_name_or_path": "t5"}, ["'t5' is a t5 model", "causal language model"]),
    ("train_sft", {"model_name_or_path": "qwen2_audio"}, ["a qwen2_audio model", "causal"]),
    ("train_sft", {"model_name_or_path": "vit"}, ["'vit' is a vit model", "causal language model"]),
    ("train_sft", {"model_name_or_path": "judge"}, ["'judge' is a reward model"]),
    ("train_grpo", {"reward_funcs": "policy"}, ["'policy' is not a reward model", "GPT2LMHead"]),
    ("train_sft", {"model_name_or_path": "quantised"}, ["quantised weights"]),
    ("train_sft", {"model_name_or_path": "few_words"}, ["300 tokens", "'few_words'", "7"]),
    ("train_sft", {"model_name_or_path": "no_eos"}, ["'no_eos'", "no eos token"]),
    ("train_sft", {"stop_token": "TL;DR:"}, ["--stop_token 'TL;DR:' is", "tokens"]),
    ("train_sft", {"model_name_or_path": "only_bin"}, ["pytorch_model.bin is a pickle", "again"]),
    ("train_sft", {"model_name_or_path": "partial"}, ["is missing, and "]),
    # Several models
    (
        "evaluate",
        CHATML | {"policies": ["chatml", "turns"], "dataset_name": "chat_pairs"},
        ["'turns' has another chat template than 'chatml'", "--tokenizer_name_or_path"],
    ),
    (
        "evaluate",
        CHATML | {"policies": ["chatml", "swapped"]},
        ["'swapped' has another tokenizer than 'chatml'", "the same ids are other tokens"],
    ),
    (
        "train_dpo",
        CHATML | {"ref_model_name_or_path": "swapped"},
        ["'swapped'", "ids are other"],
    ),
    ("train_grpo", CHATML | {"ref_model_name_or_path": "swapped"}, ["'swapped'", "ids are"]),
    (
        "train_sft",
        {"model_name_or_path": "chatml", "tokenizer_name_or_path": "swapped"},
        ["'chatml' has another tokenizer than 'swapped'"],
    ),
    ("train_grpo", SYSTEM | {"reward_funcs": "strict"}, ["No system", "row 1", "'strict'"]),
    (
        "evaluate",
        SYSTEM | {"policies": "chatml", "reward_models": "strict", "num_prompts": 0},
        ["No system", "row 1", "the reward model 'strict'"],
    ),
    (
        "train_dpo",
        {"config": "moved.yaml"},
        ["'elsewhere/sft/model' does not exist", "it is the recipe's --ref_model_name_or_path"],
    ),
    (
        "evaluate",
        {"policies": "padded", "ref_model_name_or_path": "policy"},
        ["'padded' is a reward model"],
    ),
    # Columns and rows
    ("train_sft", {"dataset_name": "pairs"}, ["'completion' is missing", "'chosen'"]),
    ("train_sft", {"dataset_name": "chat"}, ["cannot render them", "chat template"]),
    ("train_grpo", {"reward_funcs": "gold"}, ["'gold' needs the column 'facts'"]),
    (
        "train_reward",
        {"dataset_name": "margin_text", "margin_column": "margin"},
        ["row 1", "'large'", "'margin'", "finite"],
    ),
    # Sizes
    ("train_sft", {"batch_size": 0}, ["--batch_size is 0", "above 0"]),
    *(
        (stage, {"batch_size": 20_000}, ["--batch_size is 20000", "at most 10000", "4 rows"])
        for stage in STAGES
        if stage != "evaluate"
    ),
    ("train_sft", {"max_prompt_length": 60}, ["--max_prompt_length 60", "64 positions"]),
    ("train_sft", {"max_prompt_length": 5}, ["4 of 4 rows", "prompt over max_prompt_length"]),
    ("train_grpo", {"num_candidates": 4}, ["--num_generations is 8", "--num_candidates, 4"]),
    # Flags
    ("train_sft", {"learning_rte": 1}, ["'--learning_rte'", "did you mean learning_rate?"]),
    ("train_sft", {"config": "typo.yaml"}, ["typo.yaml", "'learning_rte'", "mean learning_rate?"]),
    ("train_sft", {"config": "twice.yaml"}, ["twice.yaml, line 3: the key 'seed' is there twice"]),
    ("train_sft", {"config": "null.yaml"}, ["null.yaml gives nothing for 'run_name'"]),
    ("train_grpo", {"reward_funcs": "overlong:56-48"}, ["overlong:56-48 must be tokens that rise"]),
    (
        "train_grpo",
        {"reward_funcs": "overlong:48"},
        ["overlong:48 must be tokens that rise"],
    ),
    ("train_sft", {"max_steps": "many"}, ["--max_steps", "'many'"]),
    (
        "train_dpo",
        {"pair_method": "all"},
        ["unknown argument '--pair_method'", "CHANGELOG.md those that are gone"],
    ),
    ("evaluate", {"policies": []}, ["nothing to evaluate"]),
]
FOUND_IN_WEIGHTS = ("only_bin", "partial")


@pytest.mark.parametrize(
    ("stage", "flags", "phrases"),
    MISTAKES,
    ids=[" ".join([s, *(f"{k}={v}" for k, v in flags.items())]) for s, flags, _ in MISTAKES],
)
def test_a_mistake_ends_in_one_sentence_before_weights_are_read(
    stage, flags, phrases, refusals, monkeypatch
):
    if flags.get("model_name_or_path") not in FOUND_IN_WEIGHTS:
        monkeypatch.setattr(load, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    message = refusals.sentence(stage, arguments(stage, flags))
    for phrase in phrases:
        assert phrase in message


@pytest.mark.parametrize("stage", ["train_dpo", "train_grpo", "evaluate"])
def test_a_reference_with_another_template_is_named_and_reads_the_text_of_the_policy(
    stage, refusals, monkeypatch, capsys
):
    monkeypatch.setattr(load, "load", mock.Mock(side_effect=UserError("enough.")))
    flags = CHATML | {"ref_model_name_or_path": "turns", "dataset_name": "chat_pairs"}
    flags |= {"policies": "chatml"} if stage == "evaluate" else {}
    assert refusals.status(stage, arguments(stage, flags | {"output_dir": "named"})) == 2
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("'turns' has another chat template than")]
    assert line.endswith("it reads the rows as the latter writes them")


@pytest.mark.parametrize(
    ("stage", "flags", "expected"),
    [
        ("train_sft", {}, ["Policy"]),
        ("train_reward", {}, ["RewardModel"]),
        ("train_dpo", {}, ["Policy", "Policy"]),
        ("train_dpo", {"lora_r": 2}, ["AdapterReference", "Policy"]),
        ("train_grpo", {"reward_funcs": "judge"}, ["Policy", "RewardModel", "Policy"]),
        ("evaluate", {"reward_models": "judge"}, ["RewardModel", "Policy"]),
    ],
)
def test_every_model_is_checked_before_it_is_used(
    stage, flags, expected, refusals, monkeypatch, tmp_path
):
    """The reference, reward models and what is evaluated as the policy that is trained."""
    seen: list[str] = []

    def check(model: Any, config: Any, **options: Any) -> None:
        seen.append(type(model).__name__)
        if len(seen) == len(expected):
            raise UserError("enough.")

    monkeypatch.setattr(self_checks, "only_tokens_matter", check)
    status, _ = refusals.run(stage, arguments(stage, flags | {"output_dir": tmp_path}))
    assert (status, seen) == (2, expected)


@pytest.mark.parametrize(
    ("name", "error"), [("raises", "ZeroDivisionError: division by zero"), ("leaves", "SystemExit")]
)
def test_a_reward_function_that_raises_ends_the_run_with_its_traceback(name, error, refusals):
    """Also one that calls exit(): the run must not end with the status of success."""
    flags = {"reward_funcs": f"rewards.py:{name}", "num_generations": 8, "output_dir": "begun"}
    status, errors = refusals.run("train_grpo", arguments("train_grpo", flags))
    assert status == 1
    assert re.search(rf'rewards.py", line \d+, in {name}\n(.*\n)+{error}', errors)
    assert not Path("begun/model").exists()


@pytest.mark.parametrize("stage", ["train_grpo", "evaluate"])
def test_a_sampler_that_is_not_the_policy_is_refused(stage, refusals, monkeypatch, tmp_path):
    def sample(*arguments: Any, **options: Any) -> Any:
        rollouts = plain(*arguments, **options)
        return replace(rollouts, token_logps=rollouts.token_logps + 0.1)

    plain = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", sample)
    flags = {"dataset_name": "sft", "output_dir": tmp_path / "out"}
    status, errors = refusals.run(stage, arguments(stage, flags))
    assert status == 1
    assert "self-check failed: sampler and trainer differ by 0.1 nats" in errors


def test_the_good_input_is_not_refused(folder, monkeypatch):
    """The control: without the bad value every stage goes on to load weights."""
    for stage in STAGES:
        reaches_weights(stage, {"output_dir": "good"}, monkeypatch)


def test_a_recipe_with_a_byte_order_mark_is_read(folder, monkeypatch):
    Path("bom.yaml").write_text("\ufeffseed: 5\n", encoding="utf-8")
    reaches_weights("train_sft", {"config": "bom.yaml"}, monkeypatch)


@pytest.mark.parametrize("text", ["-1e-3", "-.001", "-0.001", "-1E-3", "-1e-03"])
def test_a_negative_number_is_a_value_however_it_is_written(text, folder):
    """By itself argparse takes a dash before an exponent for a flag."""
    argv = [*arguments("train_grpo", {}), "--missing_eos_penalty", text, "--reward_weights", text]
    config = parse(GRPOConfig, argv)
    assert (config.missing_eos_penalty, config.reward_weights) == (-0.001, [-0.001])
    Path("negative.yaml").write_text(f"reward_weights: [{text}]\nmissing_eos_penalty: {text}\n")
    config = parse(GRPOConfig, ["--config", "negative.yaml", *arguments("train_grpo", {})])
    assert (config.missing_eos_penalty, config.reward_weights) == (-0.001, [-0.001])


def test_tensors_of_older_files_and_the_head_of_a_trunk_are_left_out(folder):
    """GPT-2's own file holds its masks; a reward model is made of a policy's trunk."""
    weights = load_file("policy/model.safetensors")
    shutil.copytree("policy", "older")
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.0.attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.ones(300, 8),
    }
    save_file(weights | masks, "older/model.safetensors", metadata={"format": "pt"})
    flags = {"model_name_or_path": "older"}
    for stage in ("train_sft", "train_reward"):
        run_here(stage, arguments(stage, flags | {"output_dir": f"{stage}_of_older"}))
        assert Path(f"{stage}_of_older/model/model.safetensors").is_file()


def reaches_weights(stage: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load", lambda *_, **__: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        run_here(stage, arguments(stage, flags))
    folder = Path(flags.get("output_dir", "run")).absolute()
    assert folder not in output_lock._held  # a notebook goes on, and its folder is free again


def run_here(stage: str, argv: list[str]) -> None:
    importlib.import_module(stage).main(parse(config_class(stage), argv))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", ""),  # of an unset variable
        ("owner/model", ""),  # of the hub
        ("out/run/other", ""),
        ("out/dpo_2/model", "; train_dpo.py with --output_dir out/dpo_2 writes it"),
        ("sft/model", "; train_sft.py with --output_dir sft writes it"),
        ("out/run/model", "; a training script with --output_dir out/run writes it"),
        ("out/sft_then_dpo/model", "; a training script with --output_dir out/sft_then_dpo wr"),
        ("assets/recipes", "; paths are relative to the working directory: run in the reposit"),
    ],
)
def test_why_a_path_is_missing(path, reason, folder):
    assert why_missing(path).startswith(reason)
    assert bool(why_missing(path)) == bool(reason)


def test_paths_may_have_spaces(folder):
    """Of the rows, the model, the reward file, the recipe and the run."""
    shutil.copytree("policy", "a policy")
    shutil.copytree("sft", "some rows")
    shutil.copy("rewards.py", "my rewards.py")
    Path("my recipe.yaml").write_text("reward_funcs: ['my rewards.py:lengths']\n")
    flags = {"model_name_or_path": "a policy", "dataset_name": "some rows", "output_dir": "a run"}
    argv = [*arguments("train_sft", flags), "--num_generations", "2", "--max_steps", "1"]
    run_here("train_grpo", ["--config", "my recipe.yaml", *argv])
    assert Path("a run/model/model.safetensors").is_file()
    assert read_jsonl(Path("a run/metrics.jsonl"))[-1]["reward/lengths"] > 0
    packed = gzip.compress(Path("some rows/train.jsonl").read_bytes())
    Path("some rows.jsonl.gz").write_bytes(packed)
    flags |= {"model_name_or_path": "a run/model", "dataset_name": "some rows.jsonl.gz"}
    flags["output_dir"] = "a second run"
    run_here("train_sft", arguments("train_sft", flags))


def run_script(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """A stage as a user starts it; the hub does not answer at the address it is given."""
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, *command],
        env=environment(**offline, **variables),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_script_prints_the_sentence_alone_and_exits_with_2(folder):
    flags = {"model_name_or_path": "no/body"}
    result = run_script([str(ROOT / "train_sft.py"), *arguments("train_sft", flags)])
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()  # no library logs a second try
    assert line.startswith(
        "error: no tokenizer could be loaded from 'no/body', which is no folder here: "
    )
    tiny.check_sentence(line)
    assert not Path("run").exists()


def test_a_terminal_in_ascii_shows_what_it_has_not_got_as_escapes(folder, tmp_path):
    """A run whose table of samples has other characters comes to its end."""
    speaks = """
def speaks(completions, log_extra, **columns):
    log_extra("note", ["caf\xe9"] * len(completions))
    print("caf\xe9", flush=True)
    return [float(len(text)) for text in completions]
"""
    Path("speaks.py").write_text(speaks, encoding="utf-8")
    flags = {"output_dir": tmp_path, "reward_funcs": "speaks.py:speaks", "num_sample_prompts": 1}
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    result = run_script(
        [str(ROOT / "train_grpo.py"), *arguments("train_grpo", flags)], **ascii_only
    )
    assert result.returncode == 0, result.stderr
    assert "caf\\xe9\n" in result.stdout
    (*_, line) = read_jsonl(tmp_path / "samples.jsonl")
    assert line["logged/note"] == "caf\xe9"


def check_said_once(text: str, sentence: str) -> None:
    """Check that one rank prints the sentence, and torchrun repeats it."""
    assert len(re.findall(rf"^error: {re.escape(sentence)}", text, re.MULTILINE)) == 1
    *_, last, rule = text.splitlines()  # of torchrun's own summary
    assert f": error: {sentence}" in last
    assert set(rule) == {"="}
    assert not Path("run").exists()


def test_two_processes_print_the_sentence_once(folder):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [str(ROOT / "train_sft.py"), *arguments("train_sft", {"dataset_name": "no/body"})]
    result = run_script([*torchrun, *words])
    assert result.returncode != 0
    assert result.stderr.startswith("error: ")  # no library logs a second try
    check_said_once(result.stderr, "dataset_name 'no/body' (split 'train') is no local ")
