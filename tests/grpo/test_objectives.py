"""Claim: a policy objective is one file, built in or a user's, and a broken one is refused.

About `common/objectives`. Every built-in file has a golden case and a row in "Names in papers". The
example of docs/objectives.md trains two steps and resumes to the same weights.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from ranks import SHORT_RUN, launch, run_stages, untimed_lines

from common.checkpoint import layout
from common.errors import UserError
from common.grpo.config import GRPOConfig
from common.objectives.find import POLICY, PolicyObjective, find_policy_objective
from experiments.evidence.conformance.case import CASES
from tests.variants import REWARD_FILE, stopping_model_job

pytestmark = pytest.mark.usefixtures("process_group")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE.partition("\n## GRPO")[0], re.M | re.S)
NAMES_IN_PAPERS = PAGE.partition("## Names in papers")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", POLICY)
def test_a_built_in_objective_has_a_golden_case_and_a_row(name: str):
    calls = [case["calls"]["this project"] for case in CASES if case["family"] == "policy"]
    assert any(call.get("objective", "clip") == name for call in calls)
    assert f"--policy_objective {name}" in NAMES_IN_PAPERS
    objective = find_policy_objective(name)
    objective.check()
    docstring = __import__(f"common.objectives.policy.{name}", fromlist=["x"]).__doc__
    assert re.search(r"20\d\d", docstring)
    assert "eq." in docstring or "loss =" in docstring


# ---- settings ------------------------------------------------------------------------------------


def config_of(**flags: Any) -> GRPOConfig:
    required = {"output_dir": "x", "model_name_or_path": "y", "reward_funcs": ["gold"]}
    return GRPOConfig(**required | flags)


def write(folder: Path, body: str, signature: str = "logps, old_logps, advantages, mask") -> str:
    """A user's file with one function, and its name."""
    file = folder / "mine.py"
    file.write_text(f"import torch\n\ndef mine({signature}):\n    {body}\n")
    return f"{file}:mine"


def test_settings_have_the_types_and_defaults_of_the_signature(tmp_path: Path):
    settings = "mask, *, bound=2.0, power=1, shape='tent', symmetric=False, epsilon_low=0.1"
    mine = write(tmp_path, "return logps", settings)
    config = config_of(policy_objective=mine, objective_args=["power=3", "symmetric=true"])
    values = {"bound": 2.0, "power": 3, "shape": "tent", "symmetric": True, "epsilon_low": 0.1}
    assert config.objective.settings == values
    args = ["bound=2.0", "power=3", "shape=tent", "symmetric=True"]
    assert (config.objective_args, config.epsilon_low, config.epsilon_high) == (args, 0.1, -1.0)
    saved = {"objective_args": args, "epsilon_low": 0.1, "epsilon_high": -1.0}
    assert config_of(policy_objective=mine, **saved).objective.settings == values
    for wrong in ("power=0.5", "symmetric=maybe", "bound"):
        with pytest.raises(UserError, match=f"{wrong.partition('=')[0]}=.*must be "):
            config_of(policy_objective=mine, objective_args=[wrong])


def test_flags_reach_the_objectives_whose_signature_has_them():
    assert config_of().epsilon_low == config_of().epsilon_high == 0.2
    assert config_of(policy_objective="gspo").objective.settings["epsilon_high"] == 4e-4
    config = config_of(policy_objective="cispo", epsilon_high=3.0)
    assert config.objective.settings == {"epsilon_high": 3.0, "ratio_level": "token"}
    assert config.epsilon_low == -1  # it has none
    assert config_of(epsilon_low=0.0).objective.settings["epsilon_low"] == 0
    with pytest.raises(UserError, match="epsilon_low is -0.5; it must be at least 0, or -1"):
        config_of(epsilon_low=-0.5)
    with pytest.raises(
        UserError, match=r"sapo has no setting 'epsilon_high'; its settings are tau"
    ):
        config_of(policy_objective="sapo", epsilon_high=0.3)
    for flags in (
        {"objective_args": ["delta=1.1"]},
        {"epsilon_high": 2.5, "objective_args": ["delta=3"]},
    ):
        with pytest.raises(
            UserError, match=r"clip cannot be computed: delta is .* must exceed 1 \+"
        ):
            config_of(**flags).objective.check()


def test_an_objective_that_corrects_for_the_sampler_takes_no_weights(tmp_path: Path):
    both = write(tmp_path, "return logps", "logps, old_logps, sampled_logps, mask")
    assert not config_of(
        policy_objective=both, sampler_correction="token_mask"
    ).objective.corrects_sampler
    only = write(tmp_path / "..", "return logps", "logps, sampled_logps, mask")
    for name in ("dppo", only):
        with pytest.raises(UserError, match="whose ratio is that to the sampler"):
            config_of(policy_objective=name, sampler_correction="token_mask")


# ---- the check at start --------------------------------------------------------------------------

BROKEN = {
    "return (-advantages * logps).sum()": "has not the shape",
    "return (-advantages * logps).sum(1)": "has not the shape",
    "return None": "has not the shape",
    "return torch.where(mask, -advantages * logps, 0.0), {'x': logps.sum()}": "has not the shape",
    "return torch.where(mask, -advantages * logps / 0, 0.0)": "is not finite",
    "return -advantages * logps": "is not 0 where the mask is False",
    "return torch.where(mask, -advantages * logps.detach(), 0.0)": "without a gradient",
    "return torch.where(mask, -advantages * (logps - logps.mean()), 0.0)": "depends on tokens",
    "return torch.where(mask, -advantages * logps + old_logps.mean(), 0.0)": "depends on tokens",
    "return torch.where(mask, -(advantages - advantages.mean()) * logps, 0.0)": "depends on tokens",
    "raise ValueError('no such bound')": "cannot be computed: no such bound",
}


@pytest.mark.parametrize("body", BROKEN)
def test_a_broken_objective_is_refused_in_a_sentence(tmp_path: Path, body: str):
    objective = find_policy_objective(write(tmp_path, body))
    with pytest.raises(UserError, match=BROKEN[body]) as caught:
        objective.check()
    assert str(caught.value).startswith(f"--policy_objective {tmp_path}/mine.py:mine ")
    assert str(caught.value).endswith("; see docs/objectives.md.")


@pytest.mark.parametrize(
    ("signature", "wrong"),
    [
        ("logps, rewards, mask", "takes rewards; it may take logps, old_logps"),
        ("logps, mask, *, tau", "takes tau; it may take .* settings behind a \\* with a bool"),
        ("logps, mask, *, tau=None", "takes tau; it may take"),
        ("logps, **others", "takes others"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(tmp_path: Path, signature: str, wrong: str):
    with pytest.raises(UserError, match=wrong):
        find_policy_objective(write(tmp_path, "return logps", signature))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mine.py", "name the function: path/to/file.py:function"),
        ("absent.py:mine", "there is no file 'absent.py'"),
        ("sapa", r"one of cispo, clip, dppo, gspo, sapo \(did you mean sapo\?\), or path/to/"),
    ],
)
def test_an_unknown_objective_is_answered(name: str, wrong: str):
    with pytest.raises(UserError, match=wrong):
        config_of(policy_objective=name)


def test_a_loss_of_the_wrong_sign_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture):
    find_policy_objective(
        write(tmp_path, "return torch.where(mask, advantages * logps, 0.0)")
    ).check()
    assert "does not raise the log-prob of a token with a positive" in capsys.readouterr().out
    find_policy_objective("clip").check()
    assert capsys.readouterr().out == ""


def test_only_the_tensors_that_are_named_are_passed_and_old_ones_have_no_gradient(tmp_path: Path):
    body = "return (logps - sampled_logps) * advantages * mask"
    mine = find_policy_objective(write(tmp_path, body, "advantages, logps, mask, sampled_logps"))
    assert isinstance(mine, PolicyObjective)
    logps, old, sampled = (
        torch.full((2, 2), value, requires_grad=True) for value in (1.0, 2.0, 5.0)
    )
    mask = torch.tensor([[True, False], [True, True]])
    loss, metrics = mine(logps, old, sampled, torch.tensor([1.0, 10.0]), mask)
    assert loss.tolist() == [[-4.0, 0.0], [-40.0, -40.0]]
    assert metrics == {}
    loss.sum().backward()
    assert logps.grad is not None
    assert old.grad is sampled.grad is None


# ---- a user's file in a run ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path) -> Path:
    """A folder with a tiny model that has learned to stop, a reward function and the example."""
    folder = tmp_path_factory.mktemp("objectives")
    (folder / "rewards.py").write_text(REWARD_FILE)
    (folder / "mine.py").write_text(EXAMPLE)
    launch(
        run_stages,
        1,
        folder,
        jobs=[stopping_model_job(folder / "base", tiny_gpt2, tokenizer_folder)],
    )
    return folder


def test_the_example_of_the_page_trains_two_steps_and_resumes(base: Path):
    (words,) = re.findall(r"^and add `(--policy_objective .*)` to a command", PAGE, re.M)
    flags: dict[str, Any] = SHORT_RUN | dict(re.findall(r"--(\w+) (\S+)", words)) | {
        "model_name_or_path": str(base / "base" / "model"),
        "reward_funcs": f"{base}/rewards.py:letters",
        "num_generations": 4,
        "num_iterations": 2,
        "dataset_test_split": "",
        "max_completion_length": 24,
        "max_steps": 2,
        "save_steps": 1,
    }  # fmt: skip
    resumed = flags | {"resume_from_checkpoint": str(layout.folder_of(base / "whole", 1))}
    with tiny.working_directory(base):
        run_stages([{"stage": "grpo", "flags": flags | {"output_dir": "whole"}}])
        run_stages([{"stage": "grpo", "flags": resumed | {"output_dir": "resumed"}}])
    lines = untimed_lines(base / "whole")
    assert len(lines) == 2
    assert all(line["grad_norm"] > 0 and 0 < line["objective/weight"] < 3 for line in lines)
    models = [base / name / "model" / "model.safetensors" for name in ("whole", "resumed")]
    assert models[0].read_bytes() == models[1].read_bytes()
    saved = yaml.safe_load((base / "whole" / "config.yaml").read_text())
    assert (saved["policy_objective"], saved["objective_args"]) == (
        "mine.py:truncated",
        ["bound=3.0"],
    )
    environment = json.loads((base / "whole" / "environment.json").read_text())
    digest = hashlib.sha256(EXAMPLE.encode()).hexdigest()
    assert environment["user_files"]["mine.py"] == digest
    assert len(environment["user_files"]) == 2  # and the reward function's
