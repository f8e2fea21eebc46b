"""Claim: an objective is one file, built in or a user's, and a broken one is refused.

About `common.objectives`. Its settings stand behind its name. Every built-in file has a golden
case, a line of exact optima and a row in "Names in papers". The example of docs/objectives.md
trains, resumes to the same weights, and is evaluated as it was trained.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from math import exp, inf, log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from ranks import SHORT_RUN, launch, run_stages, untimed_lines

import evaluate
from assets.recipes.conformance.case import CASES
from common import losses
from common.checkpoint import layout
from common.config.dpo import DPOConfig
from common.config.evaluate import EvaluateConfig
from common.config.grpo import GRPOConfig
from common.config.hints import SETTINGS
from common.config.parser import as_list, parse
from common.errors import FunctionError, UserError
from common.evaluation import runs
from common.objectives import probe
from common.objectives.find import Objective
from common.objectives.implicit_reward import ImplicitReward
from common.objectives.kinds import Advantages, PolicyObjective, PreferenceLoss
from common.report import evaluation_report
from experiments.evidence import optimum
from experiments.runs.stages import Stage, check_flags
from tests.variants import REWARD_FILE, VARIANTS, stopping_model_job

pytestmark = pytest.mark.usefixtures("process_group")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text()
SECTION = PAGE.partition("## Add an objective")[2].partition("\n## ")[0]
EXAMPLE = "\n\n".join(re.findall(r"^```python\n(.*?)^```", SECTION, re.M | re.S))
COMMANDS = dict(re.findall(r"^[ #]+--(\w+) (mine\.py:\w+:\S+)$", SECTION, re.M))
NAMES_IN_PAPERS = PAGE.partition("## Names in papers")[2].partition("\n## ")[0]
KINDS = (PolicyObjective, PreferenceLoss, Advantages)
FILES = [(kind, name) for kind in KINDS for name in kind.built_in()]
LINES = [*optimum.GRPO.values(), *optimum.FURTHER.values(), *optimum.PREFERENCE.values()]


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_built_in_file_has_a_golden_case_a_line_and_a_row(kind, name, capsys):
    argument = kind.flag.removeprefix("policy_")  # that names the file in a case and in a line
    calls = [case["calls"]["this project"].get(argument, "") for case in CASES]
    parameters = [inspect.signature(line).parameters for line in LINES]
    lines = [each[argument].default for each in parameters if argument in each]
    rows = re.findall(rf"--{kind.flag} ((?:[\w:=.,]+ ?)+)", NAMES_IN_PAPERS)
    places = {"golden case": calls, "line in optimum.py": lines, "row in Names in papers": rows}
    lacking = [place for place in places if name not in names_in(places[place])]
    assert not lacking, f"--{kind.flag} {name} has no {', no '.join(lacking)}"
    check(kind, *([name] if kind is not PolicyObjective else of_policy(name)))
    assert capsys.readouterr().out == ""  # no warning
    docstring = __import__(f"common.objectives.{kind.folder}.{name}", fromlist=["x"]).__doc__
    assert re.search(r"20\d\d", docstring), f"{name}: the docstring has a paper with its year"
    assert re.search(r"loss +=|A +=|w = |rho +=", docstring), f"{name}: it has the equation"


def names_in(values: Sequence[str]) -> set[str]:
    """The functions that values of a flag name."""
    return {word.partition(":")[0] for value in values for word in value.split()}


def check(kind: Any, *texts: str) -> None:
    """Find an objective and check it, as its stage does at start."""
    kind.find(*texts).check(*([0.1] if kind is PreferenceLoss else []))


def of_policy(name: str) -> list[str]:
    """A policy objective, or the clip with a file that changes its loss."""
    takes_loss = "loss" in PolicyObjective.function_of(name).inputs
    return ["clip", name] if takes_loss else [name]


def config_of(**flags: Any) -> GRPOConfig:
    required = {"output_dir": "x", "model_name_or_path": "y", "reward_funcs": ["gold"]}
    config = GRPOConfig(**required | flags)
    config.find_objective()  # as parsing does
    return config


def dpo_config(**flags: Any) -> DPOConfig:
    config = DPOConfig(**{"output_dir": "x", "model_name_or_path": "y"} | flags)
    config.find_objective()
    return config


def objective_of(config: GRPOConfig | DPOConfig) -> Any:
    found = config.find_objective()
    return found[0] if isinstance(found, tuple) else found


def advantages_of(config: GRPOConfig) -> Advantages:
    return config.find_objective()[1]


def settings_of(objective: Objective) -> list[dict[str, Any]]:
    """The settings of each function."""
    return [dict(function.settings) for function in objective.functions]


TOKENS = "logps, old_logps, advantages, mask"


def write(folder: Path, body: str, signature: str = TOKENS) -> str:
    """A user's file with one function, and its name."""
    folder.mkdir(exist_ok=True)
    file = folder / "mine.py"
    file.write_text(f"import torch\n\ndef mine({signature}):\n    {body}\n")
    return f"{file}:mine"


def test_objectives_are_called_from_python_by_their_texts():
    """Each value by hand."""
    logps, old = torch.tensor([[2.0, 1.5]]).log(), torch.zeros(1, 2)  # the ratios are 2 and 1.5
    sampled = torch.tensor([[0.1, 0.5]]).log()  # the weights before the cap are 10 and 2
    mask = torch.ones(1, 2, dtype=torch.bool)
    objective = PolicyObjective.find("clip:epsilon_high=0.75", "sampler_weights:cap=4")
    loss, metrics = objective(logps, old, sampled, torch.tensor([1.0]), mask)
    torch.testing.assert_close(loss, torch.tensor([[-1.75 * 4, -1.5 * 2]]))
    torch.testing.assert_close(metrics["sampler_weight"], torch.tensor([[4.0, 2.0]]))
    assert [function.name for function in objective.functions] == ["clip", "sampler_weights"]
    assert objective.names == "clip:epsilon_high=0.75 sampler_weights:cap=4"

    logps, ref_logps, lengths = torch.tensor([[[-3.0, -4.0]], [[-5.0, -4.0]], [[2.0, 4.0]]])
    sigmoid = PreferenceLoss.find("sigmoid:label_smoothing=0.1")(logps, ref_logps, lengths, 0.5)
    smoothed = 0.9 * log(1 + exp(-1)) + 0.1 * log(1 + exp(1))  # D is 2
    torch.testing.assert_close(sigmoid, torch.tensor([smoothed]))
    both = PreferenceLoss.find("ipo", "sft")
    assert both(logps, ref_logps, lengths, 0.25).tolist() == [0 + 1.5]
    assert both(logps, ref_logps, lengths, 0.5, weights=[2.0, 10.0]).tolist() == [2 * 1 + 10 * 1.5]
    rounded = PreferenceLoss.find("sigmoid")(logps.bfloat16(), ref_logps.bfloat16(), lengths, 0.5)
    assert rounded.dtype == torch.float32

    rewards = torch.tensor([[1.0, 0.0, 2.0]])
    for given in (rewards, rewards[None]):
        assert Advantages.find("none")(given).tolist() == [[0.0, -1.0, 1.0]]
        assert Advantages.find("rloo:scale=none")(given).tolist() == [[0.0, -1.5, 1.5]]
    with pytest.raises(ValueError, match="num_generations is 1; a group needs at least 2"):
        Advantages.find("group")(rewards[:, :1])


def test_settings_have_the_types_and_defaults_of_the_signature(tmp_path: Path):
    settings = "mask, *, bound=2.0, power=1, shape='tent', symmetric=False, epsilon_low=0.1"
    mine = write(tmp_path, "return logps", settings)
    defaults = {"bound": 2.0, "power": 1, "shape": "tent", "symmetric": False, "epsilon_low": 0.1}
    for given, values in (
        ("", {}),
        (":", {}),
        (":bound=3,symmetric=true,shape=text", {"bound": 3.0, "symmetric": True, "shape": "text"}),
        (":power=3,symmetric=False", {"power": 3}),
        (":shape=a=b:c", {"shape": "a=b:c"}),
        (":bound=3,power=2,bound=4", {"bound": 4.0, "power": 2}),  # the last of several
    ):
        (function,) = objective_of(config_of(policy_objective=[mine + given])).functions
        assert function.settings == defaults | values
        types = {name: type(value) for name, value in function.settings.items()}
        assert types == {name: type(value) for name, value in defaults.items()}
        assert (function.name, function.text) == (mine, mine + given)
        assert not function.is_built_in


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("power=0.5", "has power=0.5; it must be int"),
        ("symmetric=maybe", "has symmetric=maybe; it must be true or false"),
        ("bound=wide", "has bound=wide; it must be a finite number"),
        ("bound=wide,bound=3", "has bound=wide; it must be a finite number"),
        ("bound", "has bound without a value; write bound=VALUE"),
        ("bound=", "has bound=; it must be a finite number"),
        ("power", "has power without a value; write power=VALUE"),
        ("word", "has word without a value; write word=VALUE"),
        (" power=1", "has no setting ' power'; its settings are"),
        (
            "bond=3",
            "has no setting 'bond'; its settings are bound, power, symmetric, word; see docs",
        ),
        ("power=2,mask=3", "has no setting 'mask'; its settings are"),
    ],
)
def test_a_setting_of_another_name_or_type_is_refused_in_a_sentence(
    tmp_path: Path, given: str, wrong: str
):
    mine = write(tmp_path, "return logps", "mask, *, bound=2.0, power=1, symmetric=False, word='a'")
    with pytest.raises(UserError) as refused:
        config_of(policy_objective=[f"{mine}:{given}"])
    tiny.check_sentence(refused.value, f"--policy_objective {mine} {wrong}")


def test_a_list_of_a_recipe_that_a_comma_cut_is_refused_with_the_cause(tmp_path: Path):
    recipe = tmp_path / "grpo.yaml"
    recipe.write_text("policy_objective: [clip:epsilon_low=0.2,epsilon_high=0.28]\n")
    with pytest.raises(UserError) as refused:
        parse(GRPOConfig, [*REQUIRED, "--reward_funcs", "gold", "--config", str(recipe)])
    advice = "it must be behind a name, without blanks, and in a recipe's list in quotes"
    tiny.check_sentence(refused.value, "--policy_objective is 'epsilon_high=0.28'", advice)
    recipe.write_text('policy_objective: ["clip:epsilon_low=0.2,epsilon_high=0.28"]\n')
    config = parse(GRPOConfig, [*REQUIRED, "--reward_funcs", "gold", "--config", str(recipe)])
    assert objective_of(config).functions[0].settings["epsilon_high"] == 0.28


def test_advantages_are_one_function():
    for names in ([], ["group", "none"]):
        with pytest.raises(UserError, match="must be one function"):
            Advantages.find(*names).check()


def test_a_setting_is_finite_unless_its_default_is_not():
    """An infinite `delta` is no bound: the default."""
    infinite, default = (PolicyObjective.find(text) for text in ("clip:delta=inf", "clip"))
    assert settings_of(infinite) == settings_of(default)
    for name, given in (
        *(("clip", "delta=nan"), ("clip", "delta=-inf"), ("clip", "epsilon_low=inf")),
        *(("sampler_weights", "cap=inf"), ("sampler_weights", "cap=NaN")),
        ("sampler_weights", "floor=1e999"),
    ):
        with pytest.raises(UserError) as refused:
            config_of(policy_objective=["clip", f"{name}:{given}"])
        number = f"--policy_objective {name} has {given}; it must be a finite number"
        tiny.check_sentence(refused.value, number)


def test_settings_reach_the_function_they_stand_behind():
    bounds = {"epsilon_low": 0.2, "epsilon_high": 0.2, "delta": inf}
    assert settings_of(objective_of(config_of())) == [bounds]
    (gspo,) = settings_of(objective_of(config_of(policy_objective=["gspo"])))
    assert gspo == {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "delta": inf}
    config = config_of(policy_objective=["cispo:epsilon_high=3"])
    assert settings_of(objective_of(config)) == [{"epsilon_high": 3.0, "ratio_level": "token"}]
    assert objective_of(config).is_built_in
    config = config_of(policy_objective=["clip:epsilon_low=0", "sampler_weights:cap=3"])
    weights = {"correction": "token_truncate", "cap": 3.0, "floor": 0.0}
    assert settings_of(objective_of(config)) == [bounds | {"epsilon_low": 0.0}, weights]
    assert config.policy_objective == ["clip:epsilon_low=0", "sampler_weights:cap=3"]  # as given
    for name, given, others in (
        ("sapo", "epsilon_high=0.3", "tau_pos, tau_neg, ratio_level"),
        ("clip", "cap=3", "epsilon_low, epsilon_high, delta"),
    ):
        with pytest.raises(UserError) as refused:
            config_of(policy_objective=[f"{name}:{given}", "sampler_weights"])
        has_not = f"{name} has no setting '{given.partition('=')[0]}'; its settings are {others};"
        tiny.check_sentence(refused.value, f"--policy_objective {has_not}")


def test_a_setting_of_two_functions_may_have_two_values(tmp_path: Path):
    three = objective_of(dpo_config(loss_type=["sigmoid:label_smoothing=0.1", "sigmoid", "robust"]))
    assert settings_of(three) == [{"label_smoothing": value} for value in (0.1, 0.0, 0.0)]
    mine = write(tmp_path, "return rewards * power", "rewards, *, power=2.0, delta=1.0")
    config = config_of(advantages=f"{mine}:power=3,delta=4", policy_objective=["clip:delta=5"])
    assert settings_of(advantages_of(config)) == [{"power": 3.0, "delta": 4.0}]
    assert settings_of(objective_of(config))[0]["delta"] == 5.0
    rewards = torch.tensor([[1.0, 2.0]])
    assert advantages_of(config)(rewards).tolist() == [[3.0, 6.0]]


BOUNDS = [
    *((PolicyObjective, name, "epsilon_low") for name in ("clip", "dppo", "gspo")),
    *((PolicyObjective, name, "epsilon_high") for name in ("clip", "dppo", "gspo", "cispo")),
    *((PreferenceLoss, name, "label_smoothing") for name in ("sigmoid", "sigmoid_norm", "robust")),
    (PreferenceLoss, "simpo", "label_smoothing"),
]


def test_these_are_all_built_in_files_with_bounds():
    found = [(kind, name, each) for kind, name in FILES for each in kind.function_of(name).settings]
    bounds = ("epsilon_low", "epsilon_high", "label_smoothing")
    assert {*BOUNDS} == {setting for setting in found if setting[2] in bounds}


@pytest.mark.parametrize(("kind", "name", "setting"), BOUNDS)
def test_a_bound_below_0_and_labels_that_are_half_wrong_are_refused(kind, name, setting, capsys):
    is_share = setting == "label_smoothing"
    needed = "must lie in [0, 0.5)" if is_share else "must be at least 0"
    for value in (-0.5, -1e-9, *([0.5, 1.0] if is_share else [])):
        text = f"{name}:{setting}={value}"
        reason = f"--{kind.flag} {text} cannot be computed: {setting} is {value} but {needed};"
        with pytest.raises(UserError) as refused:
            check(kind, text)
        tiny.check_sentence(refused.value, reason)
    for value in (0, 0.4):
        check(kind, f"{name}:{setting}={value}")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("kind", "texts", "wrong"),
    [
        (PolicyObjective, ["clip:delta=1.1"], "delta is 1.1 but must exceed 1 + epsilon_high = "),
        (PolicyObjective, ["clip:epsilon_high=2.5,delta=3"], "delta is 3.0 but must exceed 1 + "),
        (PolicyObjective, ["clip", "sampler_weights:cap=0.5"], "cap is 0.5 but must be at least 1"),
        (PolicyObjective, ["clip", "sampler_weights:correction=x"], "correction is 'x' but must "),
        (Advantages, ["rloo:scale=median"], "scale is 'median' but must be one of none, false,"),
    ],
)
def test_a_value_that_a_function_cannot_compute_is_refused_at_start(kind, texts, wrong):
    with pytest.raises(UserError) as refused:
        check(kind, *texts)
    sentence = f"--{kind.flag} {' '.join(texts)} cannot be computed: {wrong}"
    tiny.check_sentence(refused.value, sentence)


@pytest.mark.parametrize("folder", ["v1.0, a=1", "mine.py"])
def test_a_user_s_file_lies_in_any_folder_without_a_colon(tmp_path: Path, folder: str):
    mine = write(tmp_path / folder, "return logps", "logps, *, bound=2.0, detach=False, kind='a'")
    (function,) = PolicyObjective.find(f"{mine}:bound=3,detach=true,kind=b").functions
    assert function.name == mine
    assert function.settings == {"bound": 3.0, "detach": True, "kind": "b"}


def test_an_objective_with_a_ratio_to_the_sampler_takes_no_weights(tmp_path: Path):
    both = write(tmp_path, "return logps", "logps, old_logps, sampled_logps, mask")
    weighed = objective_of(config_of(policy_objective=[both, "sampler_weights:cap=3"]))
    assert weighed.weighs_samples
    assert not weighed.has_ratio_to_sampler
    only = write(tmp_path / "..", "return logps", "logps, sampled_logps, mask")
    for name in ("dppo", only):
        with pytest.raises(UserError, match="has a ratio to the sampler, and weights by"):
            config_of(policy_objective=[name, "sampler_weights:cap=3"])
        config_of(policy_objective=[name, "geometric_mask"])  # which is no weight


CLIPPED = "torch.where(mask, -(logps - old_logps).exp() * advantages, 0.0)"
ON_OTHERS = "depend on other completions"
IN_PLACE = "change advantages.clone() instead"
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
    f"return {CLIPPED}.detach().numpy()": "it has the type ndarray",
    f"return {CLIPPED}, logps": "returns metrics of shape",
    f"return {CLIPPED}[:, None]": "it has the shape (1, 1, 3)",
    f"return {CLIPPED}.long()": "without a gradient",
    f"return {CLIPPED} + (logps - logps.detach()).abs().sqrt()": "whose gradient is not finite",
    f"return {CLIPPED} / mask.sum()": ON_OTHERS,
    f"return {CLIPPED} / len(mask)": ON_OTHERS,
    f"return {CLIPPED} / mask.shape[1]": ON_OTHERS,
    f"return {CLIPPED}.cumsum(0) * mask": ON_OTHERS,
    f"return {CLIPPED} * (1 + (advantages * mask).abs().max())": ON_OTHERS,
    f"return {CLIPPED} * (1 + (advantages[mask] < 0).sum())": ON_OTHERS,
    f"return {CLIPPED} * (1 + (logps - old_logps > 0.2)[mask].sum())": ON_OTHERS,
    f"return {CLIPPED} + mask * (logps - logps.detach()) * logps[mask].mean().detach()": ON_OTHERS,
    f"return {CLIPPED}, {{'x': advantages[mask].mean().expand_as(mask)}}": ON_OTHERS,
    f"return {CLIPPED} * (logps <= logps.detach()[mask].median())": ON_OTHERS,
    f"return {CLIPPED} * (1 + (((logps - old_logps).exp() * mask).max() > 20).int())": ON_OTHERS,
    f"return {CLIPPED} * torch.rand(())": "other values for the same inputs",
    f"advantages.clamp_(-9, 9); return {CLIPPED}": IN_PLACE,
    f"advantages.numpy()[:] = 1; return {CLIPPED}": "changes its inputs in place",
    f"logps.clamp_(-9); return {CLIPPED}": "changes logps in place",
}


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
        PolicyObjective.find(write(tmp_path, "return logps", signature))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mine.py", "name the function: path/to/file.py:function"),
        ("mine.py:", "name the function: path/to/file.py:function"),
        ("absent.py:mine", "there is no file 'absent.py'"),
        ("absent.py:mine:bound=3", "has 'absent.py:mine', and there is no file 'absent.py'"),
        ("sapa", r"file.py:function, or one of cispo, .*sapo.* \(did you mean sapo\?\)"),
        ("sapa:tau_pos=2", r"is 'sapa:tau_pos=2'; it must be .* \(did you mean sapo\?\)"),
    ],
)
def test_an_unknown_objective_is_answered(name: str, wrong: str):
    with pytest.raises(UserError, match=wrong):
        config_of(policy_objective=[name])


def test_only_the_tensors_that_are_named_are_passed_and_old_ones_have_no_gradient(tmp_path: Path):
    body = "return (logps - sampled_logps) * advantages * mask"
    mine = PolicyObjective.find(write(tmp_path, body, "advantages, logps, mask, sampled_logps"))
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


PAIRS = "chosen_logps, rejected_logps"
REFERENCED = f"{PAIRS}, ref_chosen_logps, ref_rejected_logps, chosen_lengths, rejected_lengths"
MARGIN = "(chosen_logps - rejected_logps - ref_chosen_logps + ref_rejected_logps)"
LOSS = f"torch.nn.functional.softplus(-0.1 * {MARGIN})"
ON_PAIRS = "depend on other pairs"
BROKEN_PAIRS = {
    "return (rejected_logps - chosen_logps).mean()": "of the shape (N,)",
    "return None": "of the shape (N,)",
    "return (rejected_logps - chosen_logps) / 0": "is not finite",
    "return (rejected_logps - chosen_logps).detach()": "without a gradient",
    "return (rejected_logps - chosen_logps) - chosen_logps.mean()": "depend on other pairs",
    "raise ValueError('no such margin')": "cannot be computed: no such margin",
}
BROKEN_REFERENCED = {
    f"return torch.nn.functional.softplus(-({MARGIN} - {MARGIN}.mean().detach()))": ON_PAIRS,
    f"return {LOSS} / len(chosen_logps)": ON_PAIRS,
    f"return {LOSS} * (1 + {MARGIN}.detach().abs().max())": ON_PAIRS,
    f"return {LOSS} * (1 + ({MARGIN} > 0).sum())": ON_PAIRS,
    f"return {LOSS} * (1 + (chosen_lengths > rejected_lengths).sum())": ON_PAIRS,
    f"return {LOSS} * chosen_lengths / chosen_lengths.max()": ON_PAIRS,
    f"return {LOSS} + 0.01 * ref_chosen_logps.mean()": ON_PAIRS,
    f"return {LOSS} + chosen_logps.max()": ON_PAIRS,
    f"return {LOSS}.roll(1)": ON_PAIRS,
    f"return {LOSS} * ({LOSS} >= {LOSS}.max())": ON_PAIRS,
    f"return {LOSS} * ({MARGIN} <= {MARGIN}.detach().quantile(0.95))": ON_PAIRS,
    f"return {LOSS} / {MARGIN}.detach().abs().max().clamp(min=20)": ON_PAIRS,
    f"return {LOSS} * (1 + ({MARGIN}.mean() < -5).int())": ON_PAIRS,
    f"return {LOSS} * (chosen_lengths <= 2 * chosen_lengths.float().mean())": ON_PAIRS,
    f"return {LOSS}.cumsum(0)": ON_PAIRS,
    f"return {LOSS}[:, None]": "of the shape (N,) of chosen_logps: it has the shape (1, 1)",
    f"return {LOSS}.detach().numpy()": "it has the type ndarray",
    "return 0.5": "it has the type float",
    f"return {MARGIN}.round().long()": "without a gradient",
    f"return {MARGIN}.abs().sqrt()": "whose gradient is not finite",
    f"return -{MARGIN}.log()": "is not finite",
    f"chosen_logps -= 1; return {LOSS}": "changes chosen_logps in place",
    f"ref_chosen_logps.clamp_(-99); return {LOSS}": "changes ref_chosen_logps in place",
    f"chosen_lengths.numpy()[:] = 1; return {LOSS}": "changes its inputs in place",
}
BROKEN_ADVANTAGES = {
    "return rewards.mean(1)": "of the shape (N, G)",
    "return None": "of the shape (N, G)",
    "return (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)": "not finite",
    "return rewards - rewards.mean()": "depends on other groups",
    "return rewards / rewards.max()": "depends on other groups",
    "return rewards / rewards.abs().max()": "depends on other groups",
    "return rewards - rewards.min()": "depends on other groups",
    "return (rewards - rewards.mean(1, keepdim=True)) / len(rewards)": "depends on other groups",
    "return rewards - rewards.median()": "depends on other groups",
    "m = rewards.mean(1, keepdim=True); return (rewards - m) * (m <= m.quantile(0.9))": (
        "depends on other groups"
    ),
    "return rewards * (rewards.std(1) > 0).sum()": "depends on other groups",
    "return torch.rand(rewards.shape)": "other values for the same inputs",
    "return rewards.numpy()": "they have the type ndarray",
    "return rewards.tolist()": "they have the type list",
    "rewards -= rewards.mean(1, keepdim=True); return rewards": "changes rewards in place",
    "x = rewards.numpy(); x -= 1; return torch.tensor(x)": "changes its inputs in place",
    "raise ValueError('no such scale')": "cannot be computed: no such scale",
}
BROKEN_GLOBAL = {
    "return rewards - rewards.mean()": "sum over processes by all_reduce",
    "return rewards - all_reduce(rewards.mean())": "sum over processes by all_reduce",
    "m = all_reduce(rewards.sum()) / all_reduce(torch.tensor(1.0 * rewards.numel())); "
    "return (rewards - m) / rewards.std()": "sum over processes by all_reduce",
}
BROKEN_KINDS = [(PolicyObjective, TOKENS, *item) for item in BROKEN.items()]
BROKEN_KINDS += [(PreferenceLoss, PAIRS, *item) for item in BROKEN_PAIRS.items()]
BROKEN_KINDS += [(PreferenceLoss, REFERENCED, *item) for item in BROKEN_REFERENCED.items()]
BROKEN_KINDS += [(Advantages, "rewards", *item) for item in BROKEN_ADVANTAGES.items()]
BROKEN_KINDS += [(Advantages, "rewards, all_reduce", *item) for item in BROKEN_GLOBAL.items()]


@pytest.mark.parametrize(("kind", "signature", "body", "message"), BROKEN_KINDS)
def test_a_broken_objective_is_refused_in_a_sentence(tmp_path, kind, signature, body, message):
    name = write(tmp_path, body, signature)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        check(kind, name)
    assert str(caught.value).startswith(f"--{kind.flag} {tmp_path}/mine.py:mine ")
    advice = ("; see docs/objectives.md.", ".clone() instead.")
    assert str(caught.value).endswith(advice)


GOOD = [
    (PolicyObjective, TOKENS, f"return {CLIPPED}.double()"),
    (PolicyObjective, TOKENS, f"return {CLIPPED}, {{'x': logps > old_logps}}"),
    (PolicyObjective, TOKENS, f"return {CLIPPED} / mask.sum(1, keepdim=True).clamp(min=1)"),
    (PolicyObjective, TOKENS, f"return {CLIPPED} - 0.1 * mask * torch.log1p(-logps.exp())"),
    (PreferenceLoss, REFERENCED, f"return {LOSS}.double()"),
    (PreferenceLoss, REFERENCED, f"return -(5 * {MARGIN}).sigmoid().log()"),
    (PreferenceLoss, REFERENCED, f"return ({MARGIN} - 1e6) ** 2"),
    (PreferenceLoss, PAIRS, "return torch.log1p(-chosen_logps.exp()) - chosen_logps"),
    (Advantages, "rewards", "return rewards.double() - rewards.double().mean(1, keepdim=True)"),
    (Advantages, "rewards", "return rewards.softmax(1) - 1 / rewards.shape[1]"),
    (Advantages, "rewards", "return (rewards > rewards.mean(1, keepdim=True)).long()"),
    (
        Advantages,
        "rewards, counted",
        "return (rewards - rewards.mean(1, keepdim=True)) * counted[:, None]",
    ),
]


def test_advantages_that_sum_over_the_processes_are_taken(tmp_path):
    body = (
        "n = all_reduce(torch.tensor(1.0 * rewards.numel())); m = all_reduce(rewards.sum()) / n; "
        "return (rewards - m) / (all_reduce(((rewards - m) ** 2).sum()) / n) ** 0.5"
    )
    check(Advantages, write(tmp_path, body, "rewards, all_reduce"))


@pytest.mark.parametrize(("kind", "signature", "body"), GOOD)
def test_an_objective_whose_rows_are_apart_is_taken(tmp_path, capsys, kind, signature, body):
    check(kind, write(tmp_path, body, signature))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "body",
    [
        f"return {CLIPPED} / mask.sum(1, keepdim=True)",
        "n = mask.sum(1, keepdim=True); r = ((logps - old_logps) * mask).sum(1, keepdim=True) / n; "
        "return -r.exp() * advantages * mask",
    ],
)
def test_a_completion_without_tokens_may_not_give_nan(tmp_path, capsys, body):
    check(PolicyObjective, write(tmp_path, body))
    assert "is not finite for a completion without tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_function_raises_at_start_names_it(tmp_path: Path, kind: Any):
    signature = {PolicyObjective: TOKENS, PreferenceLoss: PAIRS, Advantages: "rewards"}[kind]
    for body in ("raise KeyError('algebra')", "return torch.nothing", "raise SystemExit"):
        name = write(folder := tmp_path / body.split()[1].partition("(")[0], body, signature)
        with pytest.raises(FunctionError, match=r"mine.py:mine raised \w+: .* .in the check") as e:
            check(kind, name)
        assert str(e.value).startswith(f"--{kind.flag} {folder}")
        assert "Traceback" in str(e.value)


def configs() -> list[DPOConfig | GRPOConfig]:
    """Those of every variant and recipe."""
    recipes = Path(__file__).resolve().parents[2].glob("assets/recipes/*/*.yaml")
    values = [(stage, flags) for stage in ("dpo", "grpo") for flags in VARIANTS[stage]]
    values += [(path.stem, yaml.safe_load(path.read_text())) for path in sorted(recipes)]
    names = {"loss_type", "beta", "policy_objective", "advantages", "missing_eos_penalty"}
    found = []
    for stage, flags in values:
        given = {
            n: [v] if n in ("policy_objective", "loss_type") and isinstance(v, str) else v
            for n, v in flags.items()
            if n in names
        }
        if stage in ("dpo", "grpo"):
            found.append((dpo_config if stage == "dpo" else config_of)(**given))
    return found


def test_every_variant_and_recipe_passes_the_check(capsys):
    for config in configs():
        if isinstance(config, DPOConfig):
            objective_of(config).check(config.beta)
            continue
        objective_of(config).check()
        for num_generations in (2, 3, 8):
            advantages_of(config).check(2, num_generations)
    assert capsys.readouterr().out == ""


RANKS = "return rewards.argsort(1).argsort(1) - 1.0"
WRONG_SIGN = "return torch.where(mask, advantages * logps, 0.0)"
WRONG_WAY = [
    (PolicyObjective, TOKENS, WRONG_SIGN, "does not raise the log-prob of a token with a positive"),
    (PreferenceLoss, PAIRS, "return chosen_logps - rejected_logps", "does not raise the chosen l"),
    (PreferenceLoss, PAIRS, "return -chosen_logps - rejected_logps", "does not raise the chosen l"),
    (
        Advantages,
        "rewards",
        "return rewards.mean(1, keepdim=True) - rewards",
        "does not give the b",
    ),
    (Advantages, "rewards", RANKS, "gives completions of equal rewards other advantages than 0"),
]


@pytest.mark.parametrize(("kind", "signature", "body", "warning"), WRONG_WAY)
def test_the_wrong_direction_is_warned_of(tmp_path, capsys, kind, signature, body, warning):
    check(kind, write(tmp_path, body, signature))
    printed = capsys.readouterr().out
    assert printed.startswith(f"warning: --{kind.flag} {tmp_path}/mine.py:mine {warning}")


@pytest.mark.parametrize("names", [["sampler_weights"], ["clip", "sapo"], ["clip", "clip"]])
def test_one_objective_comes_first_and_what_changes_its_loss_behind_it(names: Sequence[str]):
    with pytest.raises(UserError, match="must be an objective, and behind it functions that take"):
        check(PolicyObjective, *names)


def test_a_loss_has_its_settings_and_beta_is_none_of_them():
    config = dpo_config(loss_type=["sigmoid:label_smoothing=0.1", "simpo:gamma=1", "sft"])
    smoothed = {"label_smoothing": 0.1}
    simpo = {"gamma": 1.0, "label_smoothing": 0.0}
    assert settings_of(objective_of(config)) == [smoothed, simpo, {}]
    for text, others in (
        ("sigmoid:beta=0.2", "label_smoothing"),
        ("ipo:label_smoothing=0.1", "none"),
        ("sft:beta=0.2", "none"),
    ):
        name, _, setting = text.partition("=")[0].partition(":")
        with pytest.raises(UserError) as refused:
            dpo_config(loss_type=[text])
        has_not = f"--loss_type {name} has no setting '{setting}'; its settings are {others};"
        tiny.check_sentence(refused.value, has_not)


@pytest.mark.parametrize(
    "signature", [f"{PAIRS}, beta", f"{PAIRS}, *, beta", f"{PAIRS}, *, beta=0.1, margin=0.0"]
)
def test_a_user_s_loss_gets_the_flag_s_beta(tmp_path: Path, signature: str):
    mine = write(tmp_path, "return beta * (rejected_logps - chosen_logps)", signature)
    objective = objective_of(dpo_config(loss_type=[mine], beta=0.3))
    assert "beta" in objective.functions[0].inputs
    assert "beta" not in objective.functions[0].settings
    logps = torch.tensor([[-1.0, -11.0]])
    loss = objective(logps, logps, torch.ones(1, 2), 0.3)
    torch.testing.assert_close(loss, torch.tensor([-3.0]))
    objective.check(0.3)
    with pytest.raises(UserError, match="returns a loss that is not finite"):
        objective.check(inf)
    with pytest.raises(UserError, match=r"mine.py:mine has no setting 'beta'; its settings are "):
        dpo_config(loss_type=[f"{mine}:beta=0.2"])


def test_rloo_is_divided_as_the_file_of_its_scale():
    rewards = torch.tensor([[1.0, 0.0, 2.0], [3.0, 3.0, 0.0]])
    assert config_of().advantages == "group"
    assert settings_of(advantages_of(config_of(advantages="rloo"))) == [{"scale": "none"}]
    for scale in ("none", "group", "batch"):
        config = config_of(advantages=f"rloo:scale={scale}")
        assert settings_of(advantages_of(config)) == [{"scale": scale}]
        of_file = Advantages.find(scale)(rewards)
        torch.testing.assert_close(advantages_of(config)(rewards), of_file * 3 / 2)
    for word, scale in (("true", "group"), ("false", "none")):
        of_word, same = (Advantages.find(f"rloo:scale={text}") for text in (word, scale))
        assert torch.equal(of_word(rewards), same(rewards))
    for name in ("group", "gdpo"):
        with pytest.raises(UserError) as refused:
            config_of(advantages=f"{name}:scale=none")
        has_not = f"--advantages {name} has no setting 'scale'; its settings are none;"
        tiny.check_sentence(refused.value, has_not)
    with pytest.raises(UserError, match="--advantages is required"):
        config_of(advantages="")


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


def trained_twice(base: Path, stage: str, flags: dict[str, Any]) -> Path:
    """The folder of a run of two steps, whose resumed copy has the same weights."""
    flags = SHORT_RUN | {"model_name_or_path": str(base / "base" / "model")} | flags
    flags |= {"max_completion_length": 24, "max_steps": 2, "save_steps": 1}
    whole, resumed = base / f"whole {stage}", base / f"resumed {stage}"
    again = flags | {"resume_from_checkpoint": str(layout.folder_of(whole, 1))}
    with tiny.working_directory(base):
        run_stages([{"stage": stage, "flags": flags | {"output_dir": str(whole)}}])
        run_stages([{"stage": stage, "flags": again | {"output_dir": str(resumed)}}])
    models = [folder / "model" / "model.safetensors" for folder in (whole, resumed)]
    assert models[0].read_bytes() == models[1].read_bytes()
    norms = [line["grad_norm"] for line in untimed_lines(whole) if "grad_norm" in line]
    assert len(norms) == 2
    assert min(norms) > 0
    inputs = json.loads((whole / "environment.json").read_text())["inputs"]
    digest = hashlib.sha256(EXAMPLE.encode()).hexdigest()
    assert digest in [inputs[name] for name in inputs if "mine.py" in name]
    return whole


def test_the_examples_of_grpo_train_and_resume(base: Path):
    policy, advantages = COMMANDS["policy_objective"], COMMANDS["advantages"]
    flags = {
        "policy_objective": policy,
        "advantages": advantages,
        "reward_funcs": f"{base}/rewards.py:letters",
        "num_generations": 4,
        "num_iterations": 2,
        "dataset_test_split": "",
    }
    folder = trained_twice(base, "grpo", flags)
    assert all(0 < line["objective/weight"] < 3 for line in untimed_lines(folder))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["policy_objective"], saved["advantages"]) == ([policy], advantages)
    with tiny.working_directory(base):
        again = parse(GRPOConfig, ["--config", str(folder / "config.yaml")])
        assert settings_of(objective_of(again)) == [{"bound": 3.0}]
        assert settings_of(advantages_of(again)) == [{"scale": 0.5}]


def test_the_example_of_dpo_trains_resumes_and_is_evaluated_without_its_file(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    rows = {"num_train_rows": 100, "num_eval_rows": 20}
    folder = trained_twice(base, "dpo", {"loss_type": COMMANDS["loss_type"], **rows})
    # -log sigma(beta D - 1) where D is 0
    assert untimed_lines(folder)[0]["loss"] == pytest.approx(1.3132617, abs=1e-4)
    (base / "mine.py").unlink()
    monkeypatch.setattr(evaluation_report, "write_report", lambda *_: [])
    sizes = {"max_prompt_length": 128, "max_completion_length": 24, "num_eval_rows": 20}
    policy = {"policies": [str(folder / "model")], "num_prompts": 0}
    evaluate.main(EvaluateConfig(**sizes | policy, output_dir=str(tmp_path)))
    (system,) = json.loads((tmp_path / "results.json").read_text())["systems"]
    trained = [line["eval_accuracy"] for line in untimed_lines(folder) if "eval_accuracy" in line]
    assert trained == [pytest.approx(system["accuracy"]["accuracy"])]
    assert runs.reward_of_run(str(folder / "model")) == ImplicitReward(0.1, True, False)
    (base / "mine.py").write_text(EXAMPLE)


def test_a_copy_of_a_built_in_file_has_its_constants(tmp_path: Path):
    built_in = Path(losses.__file__).with_name("objectives") / "preference" / "ipo_mean.py"
    (tmp_path / "copied.py").write_text(built_in.read_text())
    logps, lengths = torch.tensor([[-4.0, -6.0]]), torch.tensor([[2, 4]])
    values = [
        PreferenceLoss.find(name)(logps, torch.zeros(1, 2), lengths, 0.1)
        for name in ("ipo_mean", f"{tmp_path}/copied.py:ipo_mean", "ipo")
    ]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


REQUIRED = ["--output_dir", "x", "--model_name_or_path", "y", "--dataset_name", "synthetic"]
REQUIRED_OF_GRPO = [*REQUIRED, "--reward_funcs", "gold"]


def test_a_command_line_s_objective_replaces_the_recipe_s_with_all_settings(tmp_path: Path, capsys):
    recipe = tmp_path / "config.yaml"
    recipe.write_text(
        "policy_objective: ['clip:delta=3,epsilon_low=0.1', 'sampler_weights:cap=3']\n"
        "advantages: rloo:scale=group\n"
    )
    words = ["--config", str(recipe), *REQUIRED_OF_GRPO]
    bounds = {"epsilon_low": 0.2, "epsilon_high": 0.2, "delta": inf}
    weights = {"correction": "token_truncate", "cap": 3.0, "floor": 0.0}
    for given, expected, scale in (
        ([], [bounds | {"epsilon_low": 0.1, "delta": 3.0}, weights], "group"),
        (["--policy_objective", "clip"], [bounds], "group"),
        (["--policy_objective", "clip:delta=4"], [bounds | {"delta": 4.0}], "group"),
        (
            ["--policy_objective", "clip", "sampler_weights", "--advantages", "rloo"],
            [bounds, weights | {"cap": 2.0}],
            "none",
        ),
        (
            ["--policy_objective", "clip:delta=5", "--policy_objective", "clip:epsilon_low=0"],
            [bounds | {"epsilon_low": 0.0}],
            "group",
        ),
    ):
        config = parse(GRPOConfig, [*words, *given])
        assert settings_of(objective_of(config)) == expected
        assert settings_of(advantages_of(config)) == [{"scale": scale}]
    assert capsys.readouterr().out == ""


def test_weights_of_losses_are_a_flag_of_their_own(tmp_path: Path):
    recipe = tmp_path / "dpo.yaml"
    recipe.write_text(
        "loss_type: [sigmoid:label_smoothing=0.1, sft]\nloss_weights: [1, 0.5]\nbeta: 0.2\n"
    )
    words = ["--config", str(recipe), *REQUIRED, "--loss_type"]
    two = parse(DPOConfig, [*words, "hinge", "sft"])
    assert (two.loss_type, two.loss_weights, two.beta) == (["hinge", "sft"], [1.0, 0.5], 0.2)
    one = parse(DPOConfig, [*words, "sigmoid", "--loss_weights"])
    assert (settings_of(objective_of(one)), one.loss_weights) == ([{"label_smoothing": 0.0}], [])
    with pytest.raises(UserError, match="--loss_weights .* must be empty, or one number for each"):
        parse(DPOConfig, [*words, "sigmoid"])


def test_a_saved_config_builds_the_same_objective(tmp_path: Path):
    mine = write(tmp_path, "return loss", "loss, *, bound=torch.inf, shape='a', is_on=True")
    policy = ["clip:delta=inf,epsilon_low=1e-3", f"{mine}:bound=2,shape=b=c,is_on=false"]
    loss_type = ["simpo:gamma=0.5,gamma=1", "sigmoid:label_smoothing=.1", "sft"]
    for config in (
        config_of(policy_objective=policy, advantages="rloo:scale=true"),
        dpo_config(loss_type=loss_type, loss_weights=[1.0, 2.0, 3.0]),
    ):
        saved = tmp_path / "config.yaml"
        saved.write_text(yaml.safe_dump(asdict(config), sort_keys=False))
        again = parse(type(config), ["--config", str(saved)])
        assert asdict(again) == asdict(config)
        assert objective_of(again) == objective_of(config)
    assert again.loss_type == loss_type


def test_help_behind_a_name_lists_its_settings_with_their_values(tmp_path: Path, capsys: Any):
    mine = write(tmp_path, "return rewards", "rewards, *, power=2, is_on=False, shape='a'")
    recipe = tmp_path / "grpo.yaml"
    recipe.write_text(f"policy_objective: [sapo:tau_pos=9]\nadvantages: {mine}:power=3,shape=b\n")
    words = ["--config", str(recipe), "--policy_objective", "clip:delta=3", "geometric_mask"]
    of_policy = (
        "settings of clip:\n  epsilon_low=0.2 (float)\n  epsilon_high=0.2 (float)\n"
        "  delta=3 (float)\n"
        "settings of geometric_mask:\n  low=0.5 (float)\n  high=2 (float)\n"
    )
    of_mine = f"settings of {mine}:\n  power=3 (int)\n  is_on=false (bool)\n  shape=b (str)\n"
    of_losses = (
        "settings of sft:\nsettings of simpo:\n  gamma=1 (float)\n  label_smoothing=0 (float)\n"
    )
    for cls, given, listed in (
        (GRPOConfig, words, [of_policy, of_mine]),
        (DPOConfig, ["--loss_type", "sft", "simpo:gamma=1"], [of_losses]),
    ):
        with pytest.raises(SystemExit) as left:
            parse(cls, [*given, "--help"])
        assert left.value.code == 0
        printed = capsys.readouterr().out
        assert [text for text in listed if text not in printed] == []
        assert printed.count("settings of ") == "".join(listed).count("settings of ")


VALUES = {  # of settings that are flags elsewhere, or were; of the others 0.3
    "delta": "3",
    "importance_sampling_level": "sequence",
    "ratio_level": "sequence",
    "sampler_correction": "token_mask",
    "sampler_correction_cap": "3",
    "scale_rewards": "batch",
    "vllm_importance_sampling_cap": "3",
    "vllm_importance_sampling_clip_max": "3",
    "vllm_importance_sampling_correction": "true",
    "vllm_importance_sampling_mode": "sequence_mask",
}


@pytest.mark.parametrize("key", sorted({*SETTINGS} - {"objective_args"}))
def test_what_a_flag_that_is_gone_is_answered_with_is_an_objective(tmp_path, capsys, key: str):
    name, _, value = key.partition("=")
    value = value or VALUES.get(name, "0.3")
    is_of_dpo = SETTINGS[key].startswith("--loss_type")
    cls, required = (DPOConfig, REQUIRED) if is_of_dpo else (GRPOConfig, REQUIRED_OF_GRPO)
    recipe = tmp_path / "old.yaml"
    recipe.write_text(f"{name}: {value}\n")
    answer = SETTINGS[key].replace("{}", value)
    for words in ([f"--{name}", value], [f"--{name}={value}"], ["--config", str(recipe)]):
        with pytest.raises(UserError) as refused:
            parse(cls, [*required, *words])
        written = f"{name}={value}'" if "=" in words[0] else f"{name}'"
        advice = f"{written}: write {answer}; settings stand behind an objective's name"
        tiny.check_sentence(refused.value, advice)
    config = parse(cls, [*required, *answer.split()])
    for kind in cls.objective_kinds:
        check(kind, *as_list(getattr(config, kind.flag)))
    assert capsys.readouterr().out == ""


def test_settings_of_a_flag_that_is_gone_are_answered_behind_a_name(tmp_path: Path):
    recipe = tmp_path / "old.yaml"
    recipe.write_text("objective_args: [delta=3, cap=4]\n")
    for cls, words, answer in (
        (GRPOConfig, ["--objective_args", "delta=3"], "--policy_objective NAME:delta=3"),
        (
            GRPOConfig,
            ["--objective_args", "a=3", "b=4", "--bf16"],
            "--policy_objective NAME:a=3,b=4",
        ),
        (GRPOConfig, ["--config", str(recipe)], "--policy_objective NAME:delta=3,cap=4"),
        (DPOConfig, ["--objective_args", "gamma=1"], "--loss_type NAME:gamma=1"),
    ):
        with pytest.raises(UserError) as refused:
            parse(cls, [*REQUIRED, *words])
        tiny.check_sentence(
            refused.value, f"objective_args': write {answer}; settings stand behind"
        )


def test_advantages_may_read_any_reward_function(tmp_path: Path):
    mine = write(tmp_path, "return rewards_by_function[1] - 1.0", "rewards_by_function")
    Advantages.find(mine).check(2, 5)
    (tmp_path / "other").mkdir()
    both = write(tmp_path / "other", "return rewards", "rewards, rewards_by_function")
    with pytest.raises(UserError, match="takes both rewards"):
        check(Advantages, both)


def test_values_are_the_same_up_to_rounding_of_the_largest() -> None:
    near, far = 0.9 * probe.ROUNDING, 1.1 * probe.ROUNDING
    assert probe.is_same(torch.zeros(0), torch.zeros(0))
    assert probe.is_same(torch.tensor([1.0, 0.0]), torch.tensor([1.0, near]))
    assert not probe.is_same(torch.tensor([1.0, 0.0]), torch.tensor([1.0, far]))
    assert not probe.is_same(torch.tensor([9.0, 0.0]), torch.tensor([9.0, far]))  # of 1 at most
    assert not probe.is_same(torch.tensor([0.01, 0.0]), torch.tensor([0.01, 0.02 * near]))
    assert probe.is_same(torch.tensor([torch.nan, 2.0]), torch.tensor([torch.nan, 2.0 + near]))


@pytest.mark.parametrize(
    ("script", "words", "wrong"),
    [
        ("train_dpo.py", "--loss_type sigmoid:label_smoothing=0.7", "must lie in [0, 0.5)"),
        ("train_grpo.py", "--policy_objective clip:epsilon_high=-0.5", "must be at least 0"),
        ("train_grpo.py", "--policy_objective clip sampler_weights:cap=0.5", "at least 1"),
        ("train_grpo.py", "--advantages rloo:scale=foo", "scale is 'foo' but must be one of"),
        ("train_grpo.py", "--policy_objective sampler_weights", "must be an objective, and behind"),
        ("train_grpo.py", "--policy_objective clip clip", "must be an objective, and behind it"),
        ("train_grpo.py", "--policy_objective sapo:tau_pos=0", "a loss that is not finite"),
    ],
)
def test_a_value_that_a_built_in_function_refuses_is_refused_before_a_run_starts(
    script: str, words: str, wrong: str
):
    """Also by a driver of many runs, whose last one it may be."""
    flag, *values = words.split()
    needed = {"reward_funcs": ["gold"]} if script == "train_grpo.py" else {}
    flags = {"model_name_or_path": "y", **needed, flag[2:]: values}
    stage = Stage(script, Path("x"), flags=flags)
    with pytest.raises(UserError) as refused:
        check_flags([stage])
    tiny.check_sentence(refused.value, wrong)


def test_a_loss_has_a_beta_for_calls_that_give_none():
    """A list of names is taken as well."""
    logps, ref_logps = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.0]])
    lengths = torch.ones(1, 2)
    one, other = PreferenceLoss.find("hinge"), PreferenceLoss.find(["hinge"], beta=0.3)
    for loss, beta in ((one, 0.1), (other, 0.3)):
        loss.check()
        assert torch.equal(loss(logps, ref_logps, lengths), loss(logps, ref_logps, lengths, beta))
        torch.testing.assert_close(loss(logps, ref_logps, lengths), torch.tensor([1 - 2 * beta]))
