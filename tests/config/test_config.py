"""Claim: a recipe and the command line become one config, every value with the type of its field.

The command line wins over the recipe wherever it stands. What was used is saved, and gives the same
config when it is used as a recipe again. That no secret is saved is in test_security.py. About
`common.config` and `common.record.run_folder`.
"""

import dataclasses
import importlib
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mistakes import STAGES

from common.config.evaluate import EvaluateConfig
from common.config.flags import CHECKS, ENGINE, LAST, SPEED
from common.config.grpo import GRPOConfig
from common.config.parser import parse
from common.config.stages import TrainConfig
from common.errors import UserError
from common.record import environment
from common.record.environment import save_run_files
from common.record.run_folder import ENVIRONMENT, input_digests, read_config
from common.run import is_due

MORE = {"train_grpo": ["--reward_funcs", "gold"], "evaluate": ["--policies", "b"]}
NEEDED = ["--output_dir", "a", "--model_name_or_path", "b"]


def parse_text(recipe: str, folder: Path, *argv: str) -> Any:
    """The GRPO stage's config, which has a field of every type."""
    path = folder / "recipe.yaml"
    needed = "" if "reward_funcs" in recipe else "reward_funcs: [gold]\n"
    path.write_text(f"output_dir: a\nmodel_name_or_path: b\n{needed}{recipe}\n")
    return parse(GRPOConfig, ["--config", str(path), *argv])


def test_the_command_line_wins_wherever_it_stands(tmp_path):
    (tmp_path / "r.yaml").write_text("output_dir: a\nmodel_name_or_path: b\nbatch_size: 5\nseed: 6")
    recipe = ["--config", str(tmp_path / "r.yaml")]
    for argv in ([*recipe, "--seed", "7"], ["--seed", "7", *recipe], [*recipe, "--seed=7"]):
        config = parse(TrainConfig, argv)
        assert (config.batch_size, config.seed, config.learning_rate) == (5, 7, 1e-5)
    assert parse(TrainConfig, [*recipe, "--seed", "7", "--seed", "8"]).seed == 8
    assert parse(TrainConfig, [*recipe, "--batch-size", "9"]).batch_size == 9


SMALL = ("1e-5", "1.0e-5", "0.00001", "1E-5", "'1e-5'")
TRUTHS = {"true": True, "false": False, "yes": True, "no": False, "'False'": False}
PARSED: list[tuple[str, list[str], str, Any]] = [  # recipe, command line, field, its value
    # YAML 1.1 takes 1e-5 for text, for want of a point.
    *((f"learning_rate: {text}", [], "learning_rate", 1e-5) for text in SMALL),
    ("missing_eos_penalty: -2.5", [], "missing_eos_penalty", -2.5),
    ("missing_eos_penalty: -1e-3", [], "missing_eos_penalty", -0.001),
    ("stop_token: '-a'", [], "stop_token", "-a"),
    ("run_name: 12\nreport_to: wandb", [], "run_name", "12"),
    ("dataset_test_split: ''", [], "dataset_test_split", ""),
    # YAML 1.1 reads 8, 90 seconds, true and a date that is none.
    ("max_steps: 010", [], "max_steps", 10),
    ("stop_token: 1:30", [], "stop_token", "1:30"),
    ("run_name: yes\nreport_to: wandb", [], "run_name", "yes"),
    ("stop_token: 2024-13-45", [], "stop_token", "2024-13-45"),
    # A list is replaced whole.
    ("reward_funcs: [gold, a]", [], "reward_funcs", ["gold", "a"]),
    ("reward_funcs:\n  - gold\n  - a", [], "reward_funcs", ["gold", "a"]),
    ("reward_funcs: a", [], "reward_funcs", ["a"]),
    ("reward_funcs: [gold, a]", ["--reward_funcs", "c", "d", "e"], "reward_funcs", ["c", "d", "e"]),
    ("reward_funcs: [gold, a]", ["--reward_funcs", "c"], "reward_funcs", ["c"]),
    ("reward_weights: [1, -0.5, 1e-3]", [], "reward_weights", [1.0, -0.5, 0.001]),
    ("reward_weights: []", [], "reward_weights", []),
    ("reward_weights: [1]", ["--reward_weights"], "reward_weights", []),
    *((f"{name}: {t}", [], name, TRUTHS[t]) for name in ("bf16", "self_check") for t in TRUTHS),
    ("bf16: true", ["--bf16", "false"], "bf16", False),
    ("bf16: no", ["--bf16", "true"], "bf16", True),
    ("bf16: false", ["--bf16"], "bf16", True),
    ("", ["--self_check", "false"], "self_check", False),
]


@pytest.mark.parametrize(("recipe", "argv", "field", "expected"), PARSED)
def test_a_value_has_the_type_of_its_field(recipe, argv, field, expected, tmp_path):
    value = getattr(parse_text(recipe, tmp_path, *argv), field)
    assert value == expected
    assert type(value) is type(expected)


FIRST, LATER = (
    ["what", "data", "model"],
    ["optimisation", "logging, evaluation, checkpoints", "LoRA"],
)
MACHINE = ["speed, memory and sharding", "checks"]
WITH_ENGINE = ["speed, memory and sharding", "what samples (docs/rollout_engine.md)", "checks"]
ROLLOUTS = ["rollouts", "rewards", "selection and advantages", "held-out pairs", "objective"]
HEADINGS = {
    "train_sft": [*FIRST, *LATER, *MACHINE],
    "train_reward": [*FIRST, "reward model", *LATER, *MACHINE],
    "train_dpo": [*FIRST, "objective", "reference", *LATER, *MACHINE],
    "train_grpo": [*FIRST, *ROLLOUTS, "tie to the reference", *LATER, *WITH_ENGINE],
    "evaluate": [*FIRST, "what is evaluated", "generations", *WITH_ENGINE],
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_field_has_a_default_and_a_help_text(stage, capsys):
    cls = getattr(importlib.import_module(stage), STAGES[stage])
    for field in dataclasses.fields(cls):
        assert field.metadata["help"], field.name
        has_factory = field.default_factory is not dataclasses.MISSING
        assert has_factory or field.default is not dataclasses.MISSING, field.name
    with pytest.raises(SystemExit) as caught:
        parse(cls, ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(cls):
        assert f"--{field.name} " in text
    words = " ".join(text.split())
    assert "Several processes: torchrun --standalone --nproc_per_node N " in words
    headings = [title.partition(":")[0] for title in re.findall(r"^(\S.*):$", text, re.MULTILINE)]
    assert headings[1:] == HEADINGS[stage]
    assert " ".join(cls.__doc__.partition("\n")[0].split()) in words
    assert "synthetic (default: synthetic)" in words
    assert "(default: false)" in words
    assert not re.search(r"default: (False|True|\[|\d+\.0\))", words), "not as it is typed"
    assert ("empty: no evaluation" in words) == (stage != "evaluate")


def test_the_help_of_a_stage_stands_under_headings_and_has_no_flag_without_effect_in_it(capsys):
    module = importlib.import_module("experiments.sample_pairs")
    with pytest.raises(SystemExit):
        parse(module.PairsConfig, ["--help"])
    text = capsys.readouterr().out
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings[1:4] == ["what", "data", "model"]
    assert headings.index("pairs") == len(headings) - 5
    last = ["optimisation", SPEED, ENGINE, CHECKS]
    assert headings[-4:] == last == [title for title in LAST if title in headings]
    assert text.index("--dataset_name ") < text.index("--dataset_train_split ")
    assert not {"LoRA", "hub", "objective"} & {*headings}
    assert "torchrun" not in text, "it is no script of the root"
    assert "--learning_rate" not in text


@pytest.mark.parametrize("stage", STAGES)
def test_the_saved_config_is_a_recipe_for_the_same_config(stage, tmp_path):
    cls = getattr(importlib.import_module(stage), STAGES[stage])
    argv = [*NEEDED, *MORE.get(stage, []), "--seed", "3", "--max_dropped_fraction", "1e-7"]
    config = parse(cls, argv)
    save_run_files(tmp_path, config, world_size=1)
    saved = tmp_path / "config.yaml"
    assert set(yaml.safe_load(saved.read_text())) == {f.name for f in dataclasses.fields(cls)}
    assert parse(cls, ["--config", str(saved)]) == config


def test_what_a_path_with_a_tilde_names_is_watched(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("1")
    before = input_digests(["~/rows.jsonl"])
    (tmp_path / "rows.jsonl").write_text("2")
    assert before.keys() == {"~/rows.jsonl"}
    assert input_digests(["~/rows.jsonl"]) != before


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    learning_rate=st.floats(min_value=1e-37, max_value=1e38),
    missing_eos_penalty=st.floats(-1e38, 1e38).filter(lambda x: x == 0 or abs(x) > 1e-37),
    max_steps=st.integers(min_value=0, max_value=2**31 - 1),
    bf16=st.booleans(),
    stop_token=st.text().filter(lambda text: text != "--"),  # which argparse drops
    reward_funcs=st.lists(st.text("abc /.:", min_size=1), min_size=1, max_size=3),
)
def test_any_value_survives_saving(tmp_path, **values):
    config = GRPOConfig(output_dir="a", model_name_or_path="b", **values)
    save_run_files(tmp_path, config, world_size=1)
    again = parse(GRPOConfig, ["--config", str(tmp_path / "config.yaml")])
    assert again == config
    assert type(again.bf16) is bool
    assert type(again.learning_rate) is float


def test_what_ran_is_saved(tmp_path):
    config = parse(GRPOConfig, [*NEEDED, "--reward_funcs", "gold"])
    save_run_files(tmp_path / "run", config, world_size=3)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert set(environment) == {
        *("python", "platform", "cpu", "cpu_capability", "world_size", "gpu", "num_gpus"),
        *("compute_dtype", "model_commit", "dataset_commit", "git_commit", "packages"),
        *("script", "stage", "started", "inputs"),
    }
    assert environment["world_size"] == 3
    assert (environment["gpu"], environment["num_gpus"]) == (None, 0)
    assert environment["compute_dtype"] == "float32"
    save_run_files(tmp_path / "half", dataclasses.replace(config, bf16=True), world_size=1)
    assert read_config(tmp_path / "half", ENVIRONMENT)["compute_dtype"] == "bfloat16"
    assert environment["cpu"]
    assert environment["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", environment["started"])
    for name in ("torch", "transformers", "datasets", "tokenizers", "numpy"):
        # PyPI's torch 2.14.1 names its build in __version__ only: 2.14.1+cu130.
        assert importlib.import_module(name).__version__.startswith(environment["packages"][name])


def test_a_commit_with_a_tag_is_recorded_by_its_hash(tmp_path, monkeypatch):
    me = ["-c", "user.name=a", "-c", "user.email=a@b"]
    commit = [*me, "commit", "-q", "--allow-empty", "-m", "one"]
    for words in (["init", "-q"], commit, [*me, "tag", "-a", "v1", "-m", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    assert re.fullmatch("[0-9a-f]{40}", environment.git_commit() or "")


def test_a_gpu_is_recorded_with_what_drives_it(tmp_path, monkeypatch):
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sat Aug 19\nGCC 12.3.0"
    (tmp_path / "version").write_text(version)
    real = environment.Path
    monkeypatch.setattr(
        environment, "Path", lambda p: tmp_path / "version" if "nvidia" in str(p) else real(p)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert environment.accelerator(8) == {
        "gpu": "NVIDIA H200",
        "num_gpus": 8,
        "driver": "580.65.06",
        "cuda": "13.0",
        "nccl": "2.28.9",
    }


def test_an_environment_is_read_as_json(tmp_path):
    """YAML 1.1 takes other texts for numbers, and what is no JSON for a mapping."""
    assert read_config(tmp_path, ENVIRONMENT) == {}
    (tmp_path / "environment.json").write_text('{"rate": 1e-5, "name": "a\\ud83d\\ude00"}')
    assert read_config(tmp_path, ENVIRONMENT) == {"rate": 1e-5, "name": "a\U0001f600"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_number_that_is_not_finite_is_refused_for_every_flag(stage, tmp_path):
    """On the command line, in a list, in a recipe in Python's words or YAML's, and in Python."""
    cls = getattr(importlib.import_module(stage), STAGES[stage])
    needed = [*NEEDED, *MORE.get(stage, [])]
    numbers = [f for f in dataclasses.fields(cls) if f.type in (float, list[float])]
    assert numbers
    recipe = tmp_path / "recipe.yaml"
    for field in numbers:
        name, is_list = field.name, field.type is not float
        for text in ("inf", "-inf", "nan", "1e400"):
            items = ["1", text] if is_list else [text]
            with pytest.raises(UserError, match=f"--{name} is .*must be ") as caught:
                parse(cls, [*needed, f"--{name}", *items])
            tiny.check_sentence(caught.value)
        for text in ("inf", ".inf", "-.Inf", ".nan", "'nan'"):
            recipe.write_text(f"{name}: [1, {text}]" if is_list else f"{name}: {text}")
            with pytest.raises(UserError, match=f"--{name}[: ]"):
                parse(cls, ["--config", str(recipe), *needed])
        config = parse(cls, needed)
        with pytest.raises(UserError, match=f"--{name} is (inf|nan); it must be "):
            dataclasses.replace(config, **{name: [math.nan] if is_list else math.inf})


def test_is_due():
    assert [step for step in range(1, 11) if is_due(step, 3)] == [3, 6, 9]
    assert not any(is_due(step, 0) for step in range(1, 11))


def test_a_slash_at_the_end_of_a_path_makes_no_other_model():
    """Models are compared by path: the reference is recognised among the policies."""
    config = EvaluateConfig(
        output_dir="run",
        policies=["sft/model/", "dpo/model"],
        ref_model_name_or_path="sft/model//",
        model_name_or_path="/",
    )
    assert config.policies == ["sft/model", "dpo/model"]
    assert config.ref_model_name_or_path == "sft/model"
    assert config.model_name_or_path == "/"


def test_as_many_tokens_as_an_evaluation_samples_at_most():
    for number, most in ((0, 56), (9, 9)):
        config = EvaluateConfig(output_dir="x", policies=["y"], max_new_tokens=number)
        assert config.most_sampled_tokens == most
    grpo = GRPOConfig(output_dir="x", model_name_or_path="y", reward_funcs=["gold"])
    assert grpo.most_sampled_tokens == grpo.max_completion_length == 56
