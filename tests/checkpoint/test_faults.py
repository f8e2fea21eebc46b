"""Numbers that go bad stop a run before they change a parameter, and are named.

A loss or gradient that is not finite ends the run with the step, the ranks and the rows. What fails
behind the last step leaves the model. About `common.checkpoint` and `common.run`.
"""

import importlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from ranks import STAGES, untimed_lines
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.checkpoint import layout
from common.checkpoint.layout import folder_of
from common.errors import FunctionError, UserError
from common.model import optim
from common.record.jsonl import read_jsonl
from common.record.logger import RunLogger
from common.shutdown import signals
from experiments.runs.stages import config_class

pytestmark = pytest.mark.usefixtures("process_group", "without_pictures")
BAD_ROW = 5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A model whose position 90 is too large to be squared, and rows of which one reaches it."""
    folder = tmp_path_factory.mktemp("inputs")
    lm = AutoModelForCausalLM.from_config(tiny.model_config("gpt2", vocab_size=1024))
    with torch.no_grad():
        lm.transformer.wpe.weight[90, 0] = 1e30
    shutil.copytree(tokenizer_folder, folder / "model")
    lm.save_pretrained(folder / "model")
    prompts = ["the cat sat on the mat. " * (20 if n == BAD_ROW else 1 + n % 3) for n in range(8)]
    completions = {"completion": " yes", "chosen": " yes", "rejected": " no no"}
    tiny.write_rows(folder / "train.jsonl", [{"prompt": p, **completions} for p in prompts])
    return folder


def train(stage: str, inputs: Path, output_dir: Path, **fields: Any) -> None:
    values = {
        "output_dir": str(output_dir),
        "model_name_or_path": str(inputs / "model"),
        "dataset_name": str(inputs / "train.jsonl"),
        "dataset_test_split": "",
        "prompt_truncation": "start",
        "max_prompt_length": 80,
        "max_completion_length": 4,
        "batch_size": 8,
        "micro_batch_size": 3,
        "max_steps": 4,
        "logging_steps": 4,
        "self_check": False,
    }
    script = f"train_{stage}"
    importlib.import_module(script).main(config_class(script)(**(values | fields)))


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_the_rows_are_named(stage: str, inputs: Path, tmp_path: Path) -> None:
    more = {"reference_free": True} if stage == "dpo" else {}
    with pytest.raises(RuntimeError, match="at step 1 .* is not finite") as caught:
        train(stage, inputs, tmp_path / "run", max_prompt_length=92, **more)
    assert f"those of 1 rows, {BAD_ROW + 1} (rank 0)." in str(caught.value)


def test_an_infinite_loss_of_finite_scores_stops_grpo(inputs, tmp_path, monkeypatch):
    """A loss of the second step is made infinite, as a reference that underflows would."""
    step = optim.clip_and_step

    def fail_at_second(*args: Any) -> dict[str, Any]:
        return step(*args[:-1], args[-1] * (float("inf") if args[2] == 1 else 1.0))

    monkeypatch.setattr(optim, "clip_and_step", fail_at_second)
    more = {"dataset_name": "synthetic", "num_train_rows": 16, "reward_funcs": ["gold"]}
    more |= {"num_candidates": 4, "num_generations": 4, "batch_size": 4}
    with pytest.raises(RuntimeError, match="at step 2 .* loss of 1 ranks .* look at rewards"):
        train("grpo", inputs, tmp_path / "run", **more)


def test_an_exploding_run_stops_before_the_update(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="at step 2 .* nothing was changed"):
        train("sft", inputs, tmp_path / "run", learning_rate=1e30, max_grad_norm=0.0)


@pytest.mark.parametrize("stage", ["sft", "reward"])
@pytest.mark.parametrize("save_steps", [0, 1])
@pytest.mark.parametrize(
    "fields",
    [{"learning_rate": 1e39}, {"adam_epsilon": 1e-50}],  # the second is 0 in float32, of 0 / 0
    ids=str,
)
def test_weights_that_the_last_update_spoils_are_not_exported(
    fields: dict[str, Any], save_steps: int, stage: str, inputs: Path, tmp_path: Path
) -> None:
    """Nor saved: the gradient was finite, and no later loss shows it."""
    fields = fields | {"max_steps": 1, "save_steps": save_steps, "max_prompt_length": 40}
    with pytest.raises(RuntimeError, match="after step 1 .* not finite, the first in lm.trans"):
        train(stage, inputs, tmp_path / "run", **fields)
    assert not (tmp_path / "run" / "model").exists()
    assert not layout.newest_first(tmp_path / "run")


def test_adapters_whose_product_overflows_are_not_exported(inputs: Path, tmp_path: Path) -> None:
    fields = {
        "max_steps": 1,
        "learning_rate": 3e37,
        "lora_r": 2,
        "lora_alpha": 1024,
        "max_prompt_length": 40,
    }
    with pytest.raises(UserError, match="could not be written .a weight is not finite: trans"):
        train("sft", inputs, tmp_path / "run", **fields)
    assert not (tmp_path / "run" / "model").exists()


ONCE = """
import sys
from pathlib import Path

def judge(completions, trainer_state, **columns):
    rewards, failed = [float(len(text)) for text in completions], Path(__file__ + ".failed")
    if trainer_state.global_step == 2 and len(completions) == NUMBER and not failed.exists():
        failed.touch()
        FAULT
    return rewards
"""
ROLLOUTS = {"num_generations": 2, "reward_funcs": ["length"]}


@pytest.mark.parametrize(
    ("number", "fault", "message"),
    [
        (16, "raise ValueError('odd')", "raised ValueError: odd .after step 2, rows .*, from '"),
        (16, "sys.exit(3)", "raised SystemExit: 3 "),
        (16, "return rewards[1:]", "returned 15 rewards for 16 rows; .* .after step 2"),
        (16, "rewards[5] = 'x'", "returned 'x' for row 5 of the batch .after step 2, .*, from '"),
        (3, "raise ValueError('held out')", "raised ValueError: held out"),
        (4, "raise ValueError('table')", "raised ValueError: table"),
    ],
)
def test_a_reward_function_that_fails_costs_no_step(number, fault, message, inputs, tmp_path):
    """In training, in a held-out evaluation and in a table of samples: they differ in size."""
    text = ONCE.replace("NUMBER", str(number)).replace("FAULT", fault)
    (tmp_path / "rewards.py").write_text(text)
    more: dict[str, Any] = ROLLOUTS | {"reward_funcs": [f"{tmp_path}/rewards.py:judge"]}
    more |= {"dataset_test_split": "train", "num_eval_rows": 3, "num_sample_prompts": 2}
    more |= {"eval_steps": 2, "sample_steps": 2, "logging_steps": 3}
    more |= {"penalize_missing_eos": False, "learning_rate": 1e-3}
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    message = f"judge' {message}.*; the same command goes on from {broken}/.*2"
    with pytest.raises(UserError, match=message):
        train("grpo", inputs, broken, **more)
    for run in (broken, whole):
        train("grpo", inputs, run, **more)
    assert len(untimed_lines(whole)) == 5  # two of training, and evaluations at 0, 2 and 4
    assert untimed_lines(broken) == untimed_lines(whole)
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_an_evaluation_that_could_not_be_recorded_is_made_again(
    stage: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also if the table of samples behind it, or a step, fails after that."""
    more: dict[str, Any] = {"dataset_test_split": "train", "num_eval_rows": 2, "eval_steps": 2}
    more |= {"max_prompt_length": 80, "num_train_rows": 4}  # without the row that is not finite
    more |= {} if stage == "reward" else {"sample_steps": 2}
    full = mock.Mock(side_effect=UserError("the disk is full."))
    for owner, name in ((RunLogger, "log"), (RunLogger, "samples"), (optim, "clip_and_step")):
        monkeypatch.setattr(owner, name, full)
        with pytest.raises(UserError, match="disk is full"):
            train(stage, inputs, tmp_path, **more)
        monkeypatch.undo()
    train(stage, inputs, tmp_path, **more)
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    steps = [row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")]
    assert {*steps} == {2, 4}
    assert steps.count(2) == steps.count(4)


OBJECTIVES = """
import torch
import torch.nn.functional as F
from pathlib import Path

CALLS = []

def fail_once():
    CALLS.append(None)
    failed = Path(__file__ + ".failed")
    if len(CALLS) == NUMBER and not failed.exists():
        failed.touch()
        raise KeyError("algebra")

def pairs(chosen_logps, rejected_logps):
    fail_once()
    return -F.logsigmoid(0.1 * (chosen_logps - rejected_logps))

def policy(logps, advantages, mask):
    fail_once()
    return torch.where(mask, -logps * advantages, 0.0)

def groups(rewards):
    fail_once()
    return rewards - rewards.mean(1, keepdim=True)
"""
IN_CHECK = 5  # calls of an objective at start


@pytest.mark.parametrize(
    ("flag", "name", "number", "more"),
    [
        ("loss_type", "pairs", IN_CHECK + 2 * 3 + 2, {}),  # three micro-batches of a step
        ("policy_objective", "policy", IN_CHECK + 2 * 3 + 2, ROLLOUTS),
        ("advantages", "groups", IN_CHECK + 3, ROLLOUTS),
    ],
)
def test_an_objective_that_raises_in_a_step_costs_none(flag, name, number, more, inputs, tmp_path):
    """The sentence names function, step and rows; resuming gives the bits of an undisturbed run."""
    file = tmp_path / "mine.py"
    file.write_text(OBJECTIVES.replace("NUMBER", str(number)))
    value = f"{file}:{name}"
    more = {**more, flag: [value] if flag != "advantages" else value, "learning_rate": 1e-3}
    stage = "dpo" if flag == "loss_type" else "grpo"
    if stage == "grpo":
        more |= {"penalize_missing_eos": False, "beta": 0.0, "micro_batch_size": 6}
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    where = "raised KeyError: there is no 'algebra' .at step 3, rows [1-8], .*"
    with pytest.raises(FunctionError, match=rf"^--{flag} {value} {where}; the same command") as e:
        train(stage, inputs, broken, **more)
    assert f"goes on from {folder_of(broken, 2)}.\nTraceback" in str(e.value)
    for run in (broken, whole):
        train(stage, inputs, run, **more)
    assert untimed_lines(broken) == untimed_lines(whole)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (broken, whole)]
    assert weights[0] == weights[1]


def test_an_objective_that_raises_between_updates_is_said_to_leave_the_first(inputs, tmp_path):
    """The weights have moved in the step, so that no checkpoint before it can be written."""
    file = tmp_path / "mine.py"
    file.write_text(OBJECTIVES.replace("NUMBER", str(IN_CHECK + 2 * 6 + 5)))
    more: dict[str, Any] = ROLLOUTS | {"policy_objective": [f"{file}:policy"], "num_iterations": 2}
    more |= {"penalize_missing_eos": False, "beta": 0.0, "micro_batch_size": 6}
    among = "goes on from .*step_00000002, which has updates of step 3 already"
    with pytest.raises(FunctionError, match=among):
        train("grpo", inputs, tmp_path / "run", **more)
    train("grpo", inputs, tmp_path / "run", **more)
    assert len(untimed_lines(tmp_path / "run")) == 1


AT_THE_END = """
from pathlib import Path

def judge(completions, trainer_state, **columns):
    share = trainer_state.global_step / trainer_state.max_steps
    whole = 1 + Path(__file__ + ".mended").exists()
    return [1 / (whole - share) + len(completion) for completion in completions]
"""


@pytest.mark.parametrize("stage", STAGES)
def test_what_fails_behind_the_export_leaves_the_model(stage, inputs, tmp_path, monkeypatch):
    """A judge that cannot say anything of a finished run; elsewhere a screen that is gone."""
    more: dict[str, Any] = {"dataset_test_split": "train", "save_steps": 2}
    if stage == "grpo":
        (tmp_path / "rewards.py").write_text(AT_THE_END)
        more |= ROLLOUTS | {"reward_funcs": [f"{tmp_path}/rewards.py:judge"]}
    else:
        monkeypatch.setattr(RunLogger, "samples", lambda *_: print(1 / 0))
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="the model is whole in .* division by zero") as caught:
        train(stage, inputs, run, **more)
    assert f"the same command goes on from {run}/checkpoints/step_00000004" in str(caught.value)
    exported = (run / "model" / "model.safetensors").read_bytes()

    monkeypatch.undo()
    (tmp_path / "rewards.py.mended").touch()
    train(stage, inputs, run, **more)
    assert (run / "model" / "model.safetensors").read_bytes() == exported
    assert {row["step"] for row in read_jsonl(run / "samples.jsonl")} == {4}
    assert [r["step"] for r in read_jsonl(run / "metrics.jsonl") if "grad_norm" in r] == [4]


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_a_finished_run_that_goes_on_keeps_its_last_evaluation(stage, inputs, tmp_path):
    """And its samples; from an older checkpoint it makes all later lines again, each once."""
    run, by_name = tmp_path / "run", "eval_loss" if stage == "sft" else "eval_reward"
    more: dict[str, Any] = {"dataset_test_split": "train", "save_steps": 2, "eval_steps": 2}
    more |= {"logging_steps": 1, "sample_steps": 2, "num_sample_prompts": 1, "keep_last": 0}
    more |= ROLLOUTS if stage == "grpo" else {}
    start = [0] if stage == "grpo" else []

    def steps(**flags: Any) -> list[list[int]]:
        train(stage, inputs, run, **(more | flags))
        lines = read_jsonl(run / "metrics.jsonl")
        by_kind = [[line["step"] for line in lines if name in line] for name in ("loss", by_name)]
        samples = (run / "samples.jsonl").read_text().splitlines()
        assert len({*samples}) == len(samples)
        return [*by_kind, sorted({json.loads(line)["step"] for line in samples})]

    assert steps(max_steps=3) == [[1, 2, 3], [*start, 2, 3], [2, 3]]
    longer = {"max_steps": 5, "resume_from_checkpoint": "latest"}
    expected = [[1, 2, 3, 4, 5], [*start, 2, 3, 4, 5], [2, 3, 4, 5]]
    assert steps(**longer) == expected
    lines, torn = (run / "metrics.jsonl").read_text(), '{"step": 5, "lo'
    (run / "metrics.jsonl").write_text(lines + torn)
    environment = (run / "environment.json").read_text()  # of one killed in its last evaluation
    (run / "environment.json").write_text(environment.replace("finished", "begun"))
    assert steps(**longer) == expected
    assert steps(**longer | {"resume_from_checkpoint": str(folder_of(run, 3))}) == expected
    in_one_go = [[1, 2, 3, 4, 5], [*start, 2, 4, 5], [2, 4, 5]]
    assert steps(**longer | {"resume_from_checkpoint": str(folder_of(run, 2))}) == in_one_go


def test_a_run_that_is_stopped_in_its_first_step_evaluates_before_it_once(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ROLLOUTS | {"dataset_test_split": "train", "eval_steps": 2, "num_sample_prompts": 0}
    monkeypatch.setattr(signals, "_first", (signal.SIGTERM, 0.0))
    with pytest.raises(signals.Stopped, match="after step 0"):
        train("grpo", inputs, tmp_path / "run", **more)
    monkeypatch.undo()
    train("grpo", inputs, tmp_path / "run", **more)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval_reward" in line] == [0, 2, 4]


def test_a_model_that_cannot_be_written_is_kept_as_a_checkpoint(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "replacing", mock.Mock(side_effect=ValueError("no such thing")))
    with pytest.raises(UserError, match="model could not be written .no such thing.; the same"):
        train("sft", inputs, tmp_path / "run", save_steps=0)
    monkeypatch.undo()
    train("sft", inputs, tmp_path / "run", save_steps=0)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "grad_norm" in line] == [4]


def test_the_reward_shift_of_the_exported_model_is_logged_once(inputs, tmp_path):
    fields: dict[str, Any] = {"save_steps": 4, "sft_dataset_name": str(inputs / "train.jsonl")}
    run = tmp_path / "run"
    train("reward", inputs, run, **fields)
    lines = read_jsonl(run / "metrics.jsonl")
    (shift,) = [line["reward_shift"] for line in lines if "reward_shift" in line]
    (shard,) = folder_of(run, 4).glob("*.safetensors")
    weights, saved = load_file(run / "model" / "model.safetensors"), load_file(shard)
    moved = weights["transformer.ln_f.bias"] - saved["model.lm.transformer.ln_f.bias"]
    assert float(moved @ weights["score.weight"][0]) == pytest.approx(shift, rel=1e-3)
