"""Claim: an objective is one file, built in or a user's, and a broken one is refused.

About `common.objectives`. Every built-in file has a golden case, a line of exact optima and a row
in "Names in papers". The example of docs/objectives.md trains, resumes to the same weights, and is
evaluated as it was trained.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from math import inf
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
from common.config.parser import parse
from common.errors import FunctionError, UserError
from common.evaluation import runs
from common.objectives import probe
from common.objectives.implicit_reward import ImplicitReward
from common.objectives.kinds import Advantages, PolicyObjective, PreferenceLoss
from common.report import evaluation_report
from experiments.evidence import optimum
from tests.variants import REWARD_FILE, VARIANTS, stopping_model_job

pytestmark = pytest.mark.usefixtures("process_group")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text()
SECTION = PAGE.partition("## Add an objective")[2].partition("\n## ")[0]
EXAMPLE = "\n\n".join(re.findall(r"^```python\n(.*?)^```", SECTION, re.M | re.S))
COMMANDS = re.findall(r"^[ #]+--.*--objective_args.*$", SECTION, re.M)
WORDS = [dict(re.findall(r"--(\w+) (\S+)", line)) for line in COMMANDS]
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
    rows = re.findall(rf"--{kind.flag} ((?:\w+ ?)+)", NAMES_IN_PAPERS)
    places = {"golden case": calls, "line in optimum.py": lines, "row in Names in papers": rows}
    lacking = [place for place in places if name not in " ".join(places[place]).split()]
    assert not lacking, f"--{kind.flag} {name} has no {', no '.join(lacking)}"
    objective = kind.find([name] if kind is not PolicyObjective else of_policy(name))
    objective.check()
    assert capsys.readouterr().out == ""  # no warning
    docstring = __import__(f"common.objectives.{kind.folder}.{name}", fromlist=["x"]).__doc__
    assert re.search(r"20\d\d", docstring), f"{name}: the docstring has a paper with its year"
    assert re.search(r"loss +=|A +=|w = |rho +=", docstring), f"{name}: it has the equation"


def of_policy(name: str) -> list[str]:
    """A policy objective, or the clip with a file that changes its loss."""
    takes_loss = "loss" in PolicyObjective.function_of(name).inputs
    return ["clip", name] if takes_loss else [name]


def config_of(**flags: Any) -> GRPOConfig:
    required = {"output_dir": "x", "model_name_or_path": "y", "reward_funcs": ["gold"]}
    return GRPOConfig(**required | flags)


TOKENS = "logps, old_logps, advantages, mask"


def write(folder: Path, body: str, signature: str = TOKENS) -> str:
    """A user's file with one function, and its name."""
    folder.mkdir(exist_ok=True)
    file = folder / "mine.py"
    file.write_text(f"import torch\n\ndef mine({signature}):\n    {body}\n")
    return f"{file}:mine"


def test_settings_have_the_types_and_defaults_of_the_signature(tmp_path: Path):
    settings = "mask, *, bound=2.0, power=1, shape='tent', symmetric=False, epsilon_low=0.1"
    mine = write(tmp_path, "return logps", settings)
    config = config_of(policy_objective=[mine], objective_args=["power=3", "symmetric=true"])
    values = {"bound": 2.0, "power": 3, "shape": "tent", "symmetric": True, "epsilon_low": 0.1}
    assert config.objective.settings == values
    args = ["bound=2.0", "power=3", "shape=tent", "symmetric=True"]
    assert (config.objective_args, config.epsilon_low, config.epsilon_high) == (args, 0.1, -1.0)
    saved = {"objective_args": args, "epsilon_low": 0.1, "epsilon_high": -1.0}
    assert config_of(policy_objective=[mine], **saved).objective.settings == values
    for wrong in ("power=0.5", "symmetric=maybe", "bound"):
        with pytest.raises(UserError, match=f"{wrong.partition('=')[0]}=.*must be "):
            config_of(policy_objective=[mine], objective_args=[wrong])


def test_a_setting_is_finite_unless_its_default_is_not():
    """An infinite `delta` is no bound: the default, and what a saved config has."""
    assert config_of(objective_args=["delta=inf"]).objective.settings["delta"] == inf
    weights = ["clip", "sampler_weights"]
    for text in ("delta=nan", "delta=-inf", "cap=inf", "cap=NaN", "floor=1e999"):
        with pytest.raises(UserError, match=f"has {text}; it must be a finite number"):
            config_of(policy_objective=weights, objective_args=[text])


def test_flags_reach_the_objectives_whose_signature_has_them():
    assert config_of().epsilon_low == config_of().epsilon_high == 0.2
    assert config_of(policy_objective=["gspo"]).objective.settings["epsilon_high"] == 4e-4
    config = config_of(policy_objective=["cispo"], epsilon_high=3.0)
    assert config.objective.settings == {"epsilon_high": 3.0, "ratio_level": "token"}
    assert config.epsilon_low == -1  # it has none
    assert config_of(epsilon_low=0.0).objective.settings["epsilon_low"] == 0
    with pytest.raises(UserError, match="epsilon_low is -0.5; it must be at least 0, or -1"):
        config_of(epsilon_low=-0.5)
    with pytest.raises(
        UserError, match=r"sapo has no setting 'epsilon_high'; its settings are tau"
    ):
        config_of(policy_objective=["sapo"], epsilon_high=0.3)
    for flags in (
        {"objective_args": ["delta=1.1"]},
        {"epsilon_high": 2.5, "objective_args": ["delta=3"]},
    ):
        with pytest.raises(
            UserError, match=r"clip cannot be computed: delta is .* must exceed 1 \+"
        ):
            config_of(**flags).objective.check()


def test_an_objective_with_a_ratio_to_the_sampler_takes_no_weights(tmp_path: Path):
    both = write(tmp_path, "return logps", "logps, old_logps, sampled_logps, mask")
    weighed = config_of(policy_objective=[both, "sampler_weights"]).objective
    assert weighed.weighs_samples
    assert not weighed.has_ratio_to_sampler
    only = write(tmp_path / "..", "return logps", "logps, sampled_logps, mask")
    for name in ("dppo", only):
        with pytest.raises(UserError, match="has a ratio to the sampler, and weights by"):
            config_of(policy_objective=[name, "sampler_weights"])
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
        PolicyObjective.find([write(tmp_path, "return logps", signature)])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mine.py", "name the function: path/to/file.py:function"),
        ("absent.py:mine", "there is no file 'absent.py'"),
        ("sapa", r"file.py:function, or one of cispo, .*sapo.* \(did you mean sapo\?\)"),
    ],
)
def test_an_unknown_objective_is_answered(name: str, wrong: str):
    with pytest.raises(UserError, match=wrong):
        config_of(policy_objective=[name])


def test_only_the_tensors_that_are_named_are_passed_and_old_ones_have_no_gradient(tmp_path: Path):
    body = "return (logps - sampled_logps) * advantages * mask"
    mine = PolicyObjective.find([write(tmp_path, body, "advantages, logps, mask, sampled_logps")])
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
        kind.find([name]).check()
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
    Advantages.find([write(tmp_path, body, "rewards, all_reduce")]).check()


@pytest.mark.parametrize(("kind", "signature", "body"), GOOD)
def test_an_objective_whose_rows_are_apart_is_taken(tmp_path, capsys, kind, signature, body):
    kind.find([write(tmp_path, body, signature)]).check()
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
    PolicyObjective.find([write(tmp_path, body)]).check()
    assert "is not finite for a completion without tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_function_raises_at_start_names_it(tmp_path: Path, kind: Any):
    signature = {PolicyObjective: TOKENS, PreferenceLoss: PAIRS, Advantages: "rewards"}[kind]
    for body in ("raise KeyError('algebra')", "return torch.nothing", "raise SystemExit"):
        name = write(folder := tmp_path / body.split()[1].partition("(")[0], body, signature)
        with pytest.raises(FunctionError, match=r"mine.py:mine raised \w+: .* .in the check") as e:
            kind.find([name]).check()
        assert str(e.value).startswith(f"--{kind.flag} {folder}")
        assert "Traceback" in str(e.value)


def configs() -> list[DPOConfig | GRPOConfig]:
    """Those of every variant and recipe."""
    recipes = Path(__file__).resolve().parents[2].glob("assets/recipes/*/*.yaml")
    values = [(stage, flags) for stage in ("dpo", "grpo") for flags in VARIANTS[stage]]
    values += [(path.stem, yaml.safe_load(path.read_text())) for path in sorted(recipes)]
    names = {"loss_type", "beta", "label_smoothing", "policy_objective", "epsilon_low"}
    names |= {"epsilon_high", "objective_args", "advantages", "scale_rewards"}
    names |= {"missing_eos_penalty"}
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
        config.objective.check()
        if isinstance(config, GRPOConfig):
            for num_generations in (2, 3, 8):
                config.advantage_function.check(2, num_generations)
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
    kind.find([write(tmp_path, body, signature)]).check()
    printed = capsys.readouterr().out
    assert printed.startswith(f"warning: --{kind.flag} {tmp_path}/mine.py:mine {warning}")


@pytest.mark.parametrize("names", [["sampler_weights"], ["clip", "sapo"], ["clip", "clip"]])
def test_one_objective_comes_first_and_what_changes_its_loss_behind_it(names: Sequence[str]):
    with pytest.raises(UserError, match="must be an objective, and behind it functions that take"):
        PolicyObjective.find(names).check()


def dpo_config(**flags: Any) -> DPOConfig:
    return DPOConfig(**{"output_dir": "x", "model_name_or_path": "y"} | flags)


def test_flags_of_dpo_reach_the_losses_that_have_them():
    config = dpo_config(loss_type=["sigmoid", "simpo", "sft"], beta=0.3, label_smoothing=0.1)
    sigmoid, simpo, sft = (function.settings for function in config.objective.functions)
    assert sigmoid == {"beta": 0.3, "label_smoothing": 0.1}
    assert simpo == {"beta": 0.3, "gamma": 0.0, "label_smoothing": 0.1}
    assert sft == {}
    assert config.objective_args == ["gamma=0.0"]
    for name in ("beta", "label_smoothing"):
        with pytest.raises(UserError, match=f"has {name}; give it as --{name}"):
            dpo_config(objective_args=[f"{name}=0.2"])
    with pytest.raises(UserError, match="ipo has no setting 'label_smoothing'; its settings are b"):
        dpo_config(loss_type=["ipo"], label_smoothing=0.1)


def test_scale_rewards_is_the_name_of_advantages_or_a_setting_of_them(tmp_path: Path):
    assert (config_of().advantages, config_of().scale_rewards) == ("group", "")
    for flags in ({"scale_rewards": "batch"}, {"advantages": "batch"}):
        config = config_of(**flags)
        assert (config.advantages, config.scale_rewards) == ("batch", "")
    with pytest.raises(UserError, match="group has no setting 'scale_rewards'"):
        config_of(advantages="group", scale_rewards="none")
    assert config_of(advantages="rloo").scale_rewards == "none"
    scaled = config_of(advantages="rloo", scale_rewards="group")
    assert scaled.advantage_function.settings == {"scale_rewards": "group"}
    with pytest.raises(UserError, match="gdpo has no setting 'scale_rewards'"):
        config_of(advantages="gdpo", scale_rewards="none")
    mine = write(tmp_path, "return rewards * power", "rewards, *, power=2.0, delta=1.0")
    config = config_of(advantages=mine, objective_args=["power=3", "delta=4"])
    assert config.advantage_function.settings == {"power": 3.0, "delta": 4.0}
    assert config.objective.settings["delta"] == 4.0  # both have it
    assert config.objective_args == ["delta=4.0", "power=3.0"]
    with pytest.raises(UserError, match="clip has no setting 'gamma'; its settings are .*power"):
        config_of(advantages=mine, objective_args=["gamma=3"])


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
    policy, advantages = WORDS[0], WORDS[1]
    flags = {
        **policy,
        **advantages,
        "objective_args": [policy["objective_args"], advantages["objective_args"]],
        "reward_funcs": f"{base}/rewards.py:letters",
        "num_generations": 4,
        "num_iterations": 2,
        "dataset_test_split": "",
    }
    folder = trained_twice(base, "grpo", flags)
    assert all(0 < line["objective/weight"] < 3 for line in untimed_lines(folder))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    names = ("policy_objective", "advantages", "objective_args")
    expected = (["mine.py:truncated"], "mine.py:median", ["bound=3.0", "scale=0.5"])
    assert tuple(saved[name] for name in names) == expected


def test_the_example_of_dpo_trains_resumes_and_is_evaluated_without_its_file(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = trained_twice(base, "dpo", WORDS[2] | {"num_train_rows": 100, "num_eval_rows": 20})
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
        PreferenceLoss.find([name])(logps, torch.zeros(1, 2), lengths)
        for name in ("ipo_mean", f"{tmp_path}/copied.py:ipo_mean", "ipo")
    ]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_a_recipe_s_settings_are_those_of_its_own_objective(tmp_path: Path, capsys: Any):
    """Also of config.yaml, which has all settings of a run. What is not taken is printed."""
    recipe = tmp_path / "config.yaml"
    recipe.write_text("objective_args: [delta=3]\nepsilon_low: 0.1\nadvantages: batch\n")
    required = ["--output_dir", "x", "--model_name_or_path", "y", "--dataset_name", "synthetic"]
    words = ["--config", str(recipe), *required, "--reward_funcs", "gold"]
    same = parse(GRPOConfig, [*words, "--policy_objective", "clip"])
    assert same.objective.settings == {"epsilon_low": 0.1, "epsilon_high": 0.2, "delta": 3.0}
    wrapped = parse(GRPOConfig, [*words, "--policy_objective", "clip", "sampler_weights"])
    assert same.objective.settings.items() <= wrapped.objective.settings.items()
    rloo = parse(GRPOConfig, [*words, "--advantages", "rloo"])
    assert rloo.objective.settings == same.objective.settings
    assert capsys.readouterr().out == ""
    other = parse(GRPOConfig, [*words, "--policy_objective", "gspo"])
    assert (other.epsilon_low, other.epsilon_high, other.advantages) == (3e-4, 4e-4, "batch")
    assert other.objective.settings["delta"] == torch.inf
    assert f"not taken from {recipe}, whose" in (printed := capsys.readouterr().out)
    assert printed.endswith("replaces: epsilon_low=0.1, delta=3\n")


def test_objective_args_of_a_command_line_leave_the_recipe_s_others(tmp_path: Path, capsys: Any):
    mine = write(tmp_path, "return rewards", "rewards, *, power=2.0, scale=1.0")
    recipe = tmp_path / "grpo.yaml"
    recipe.write_text(f"objective_args: [delta=3, power=4, scale=5]\nadvantages: {mine}\n")
    required = ["--output_dir", "x", "--model_name_or_path", "y", "--dataset_name", "synthetic"]
    words = ["--config", str(recipe), *required, "--reward_funcs", "gold", "--objective_args"]
    for given, expected in (
        (["power=7"], ["delta=3.0", "power=7.0", "scale=5.0"]),
        (["scale=1", "delta=4"], ["delta=4.0", "power=4.0", "scale=1.0"]),
        ([], ["delta=inf", "power=2.0", "scale=1.0"]),
    ):
        assert parse(GRPOConfig, [*words, *given]).objective_args == expected
    other = parse(GRPOConfig, [*words, "delta=4", "--advantages", "group"])
    assert other.objective_args == ["delta=4.0"]
    assert capsys.readouterr().out.endswith("replaces: power=4, scale=5\n")


def test_weights_and_settings_of_losses_go_with_them(tmp_path: Path, capsys: Any):
    recipe = tmp_path / "dpo.yaml"
    recipe.write_text(
        "loss_type: [sigmoid, sft]\nloss_weights: [1, 0.5]\nlabel_smoothing: 0.1\nbeta: 0.2\n"
    )
    required = ["--output_dir", "x", "--model_name_or_path", "y", "--dataset_name", "synthetic"]
    words = ["--config", str(recipe), *required, "--loss_type"]
    one = parse(DPOConfig, [*words, "sigmoid"])
    assert (one.loss_weights, one.label_smoothing, one.beta) == ([], 0.1, 0.2)
    assert capsys.readouterr().out.endswith("replaces: loss_weights=1 0.5\n")
    other = parse(DPOConfig, [*words, "robust"])
    assert (other.label_smoothing, other.beta) == (0.0, 0.2)
    assert "label_smoothing=0.1" in capsys.readouterr().out


def test_advantages_may_read_any_reward_function(tmp_path: Path):
    mine = write(tmp_path, "return rewards_by_function[1] - 1.0", "rewards_by_function")
    Advantages.find([mine]).check(2, 5)
    (tmp_path / "other").mkdir()
    both = write(tmp_path / "other", "return rewards", "rewards, rewards_by_function")
    with pytest.raises(UserError, match="takes both rewards"):
        Advantages.find([both]).check()


def test_values_are_the_same_up_to_rounding_of_the_largest() -> None:
    near, far = 0.9 * probe.ROUNDING, 1.1 * probe.ROUNDING
    assert probe.is_same(torch.zeros(0), torch.zeros(0))
    assert probe.is_same(torch.tensor([1.0, 0.0]), torch.tensor([1.0, near]))
    assert not probe.is_same(torch.tensor([1.0, 0.0]), torch.tensor([1.0, far]))
    assert not probe.is_same(torch.tensor([9.0, 0.0]), torch.tensor([9.0, far]))  # of 1 at most
    assert not probe.is_same(torch.tensor([0.01, 0.0]), torch.tensor([0.01, 0.02 * near]))
    assert probe.is_same(torch.tensor([torch.nan, 2.0]), torch.tensor([torch.nan, 2.0 + near]))
