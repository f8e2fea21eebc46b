"""Claim: where TRL is right, every loss here is TRL's, in value and in gradient.

TRL's side is TRL's own code (`trl_case.py`), never a copy of its formulas. By the calls of the
golden cases that agree, and by further ones, both sides get the same float64 tensors: rows of
different lengths, ratios on both sides of every bound. Where TRL and the papers part is in
test_disagreements.py. About `common.losses`, `common.advantages` and `common.objectives`.
"""

from types import SimpleNamespace

import pytest
import tiny
import torch
import trl_code
from torch import Tensor
from trl.experimental.cpo import CPOTrainer

from assets.recipes.conformance.case import CASES, OurCase, compute
from assets.recipes.conformance.trl_case import TrlCase
from common import losses
from common.batch import padded_batch
from common.forward import Policy
from common.objectives.kinds import Advantages, PreferenceLoss
from common.objectives.policy.sampler_weights import CORRECTIONS, sampler_weights

NUM_ROWS, NUM_COLUMNS = 12, 6
MASK = torch.arange(NUM_COLUMNS) < torch.tensor([6, 1, 3, 4, 2, 6, 5, 1, 6, 2, 3, 4])[:, None]
REWARDS = torch.tensor(
    [[1.0, 0.0, 0.5, 2.0], [3.0, 3.0, 3.0, -1.0], [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0]]
)


def near(logps: Tensor, seed: int, spread: float = 0.5) -> Tensor:
    """Log-probs some way off the given ones, to either side."""
    generator = torch.Generator().manual_seed(seed)
    return logps + spread * torch.randn(logps.shape, generator=generator, dtype=torch.float64)


REF = -3 * torch.rand(MASK.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OLD = near(REF, 1)
LOGPS, SAMPLED = near(OLD, 3), near(OLD, 5, spread=0.2)
ADVANTAGES = near(torch.zeros(NUM_ROWS, 1), 2, spread=1.0).expand(MASK.shape)
INPUTS = {"logps": LOGPS, "ref_logps": REF, "old_logps": OLD, "sampled_logps": SAMPLED}
INPUTS |= {"mask": MASK, "advantages": ADVANTAGES}


def with_settings(name: str, settings: dict[str, float | str]) -> str:
    """An objective as its flag has it."""
    return f"{name}:{','.join(f'{setting}={value}' for setting, value in settings.items())}"


def policy_case(ours: dict, trl: dict) -> dict:
    calls = {"this project": {"aggregate": {"aggregation": "grpo"}} | ours, "TRL": trl}
    names = ("logps", "old_logps", "sampled_logps", "advantages", "mask")
    return {"family": "policy", "calls": calls, "inputs": names, "gradient": ()}


CLIPS = [
    {"epsilon_low": 0.2, "epsilon_high": 0.2},
    {"epsilon_low": 0.1, "epsilon_high": 0.28},
    {"epsilon_low": 0.2, "epsilon_high": 0.2, "delta": 1.5},
]
AGGREGATIONS: dict[str, dict] = {
    "grpo": {"aggregation": "grpo"},
    "bnpo": {"aggregation": "token"},
    "dapo": {"aggregation": "token"},
    "dr_grpo": {"aggregation": "constant", "max_length": 9},
}
GRPO = [
    policy_case(
        {"objective": with_settings(objective, clip), "aggregate": aggregate},
        {"importance_sampling_level": level, "loss_type": name, "max_completion_length": 9} | clip,
    )
    for level, objective in (("token", "clip"), ("sequence", "gspo"))
    for clip in CLIPS
    for name, aggregate in AGGREGATIONS.items()
]
TEMPERATURES = {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 1.5}
FURTHER = [
    policy_case(
        {"objective": with_settings(name, ours | {"ratio_level": level}), "aggregate": aggregate},
        {"loss_type": name, "importance_sampling_level": level} | trl,
    )
    for level in losses.RATIO_LEVELS
    for name, ours, aggregate, trl in (
        # TRL's `epsilon_high` is the bound itself; ours, as the paper's, is its distance from 1.
        ("cispo", {"epsilon_high": 0.28}, AGGREGATIONS["dapo"], {"epsilon_high": 1.28}),
        ("sapo", {"tau_pos": 0.5, "tau_neg": 1.5}, AGGREGATIONS["grpo"], TEMPERATURES),
    )
]
# TRL compares with the sampler's log-probs, as DeepSeek-V3.2 does.
MASKED = policy_case(
    {"objective": "clip off_policy_mask:threshold=0.05"},
    {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
)
# Of one pair or token alone: test_disagreements.py has the SFT term, and SAPO is in FURTHER.
OF_ONE = ("SFT term of a pair", "SAPO, tau 1: ratio 1.5, A = 1")
AGREED = [
    case
    for case in CASES
    if isinstance(case["calls"].get("TRL"), dict) and "TRL" not in case.get("why", {})
    if case["name"] not in OF_ONE
]


@pytest.mark.parametrize("case", [*AGREED, *GRPO, *FURTHER, MASKED], ids=lambda c: c.get("name"))
def test_value_and_gradient_are_trls(case: dict):
    names = [name.replace("probs", "logps") for name in case["inputs"]]
    is_pairs = case["family"] == "bradley_terry"
    rewards = {"rewards": LOGPS[:, 0] if is_pairs else REWARDS}
    inputs = {name: (INPUTS | rewards)[name].tolist() for name in names}
    case = case | {"inputs": inputs}
    if case.get("micro_batches") == [1, 1]:
        case["micro_batches"] = [5, 7]  # 16 and 27 tokens
    else:
        case.pop("micro_batches", None)
    ours, trl = compute(case, OurCase), compute(case, TrlCase)
    if case["family"] == "group_advantages":  # by TRL in float32
        torch.testing.assert_close(ours[0], trl[0], rtol=1e-5, atol=1e-6)
        return
    assert trl[1].abs().max() > 1e-4
    for value, expected in zip(ours, trl, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    if case in GRPO:  # these tensors put every bound to work
        assert 0 < ((ours[1] == 0) & MASK).sum() < MASK.sum()


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge", "simpo"])
def test_losses_of_trls_cpo_are_ours_without_a_reference(loss_type: str):
    """Smoothing and the summed IPO, which TRL's DPO does not have, and SimPO, per pair."""
    leaf = LOGPS.clone().requires_grad_()
    sums = losses.masked_sum(leaf, MASK, dim=1).view(2, -1).T  # (N, 2)
    lengths = MASK.sum(1).view(2, -1).T
    of_trl = sums / lengths if loss_type == "simpo" else sums  # TRL wants log-probs per token
    smoothing = 0.2 if loss_type in ("sigmoid", "simpo") else 0.0
    settings = {"label_smoothing": smoothing} if smoothing else {}
    settings |= {"gamma": 0.5} if loss_type == "simpo" else {}
    objective = PreferenceLoss.find(with_settings(loss_type, settings))
    ours = objective(sums, torch.zeros_like(sums), lengths, 0.7)
    trainer = SimpleNamespace(loss_type=loss_type, beta=0.7, label_smoothing=smoothing)
    vars(trainer).update(alpha=0.0, simpo_gamma=0.5, accelerator=leaf)
    trl = CPOTrainer.cpo_loss(trainer, *of_trl.unbind(-1))[0]
    torch.testing.assert_close(ours, trl, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(x.mean(), leaf, retain_graph=True)[0] for x in (ours, trl)]
    assert gradients[1].abs().max() > 1e-4
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_kl_in_the_reward_is_trls_rloo():
    """The sum of k1 over the completion, times beta, leaves the reward before the baseline does."""
    rewards, logps, ref = REWARDS[:3], OLD.float(), REF.float()
    k1 = losses.kl_estimate(logps, ref, estimator="k1").sum(dim=1)  # (B,): every token counts
    charged = rewards - 0.2 * k1.view_as(rewards)
    assert (charged - rewards).abs().max() > 0.1
    ours = Advantages.find("rloo")(charged)
    case = TrlCase(rewards=rewards, logps=logps, ref_model=SimpleNamespace(logps=ref))
    trl = case.rollout(is_rloo=True, beta=0.2)["advantages"]
    torch.testing.assert_close(ours.flatten(), trl, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_weights_of_another_sampler(correction: str):
    """Every token counts; TRL's weights of completions are (B, 1)."""
    sampled = near(REF, 4, spread=0.2)
    everything = torch.ones_like(MASK)
    _, metrics = sampler_weights(REF, REF, sampled, everything, correction=correction, cap=1.3)
    ours = metrics["sampler_weight"]
    outputs = TrlCase(rewards=REWARDS[:3], logps=REF.float(), sampled_logps=sampled).rollout(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=correction,
        vllm_importance_sampling_clip_min=1 / 1.3 if correction.endswith("mask") else None,
        vllm_importance_sampling_clip_max=1.3,
    )
    trl = outputs["importance_sampling_ratio"].expand_as(ours).double()
    assert ours.unique().numel() > 3
    assert ((ours == 0) | (ours == 1.3)).any()
    torch.testing.assert_close(ours, trl, rtol=1e-5, atol=1e-5)


# Lengths of the prompts, and of the completions of each. GPT-2 needs equal prompts: TRL passes no
# position ids (see test_disagreements.py). Rotary models do not notice.
SHAPES = [("gpt2", (5, 5, 5)), ("llama", (5, 1, 9)), ("qwen2", (5, 1, 9))]


@pytest.mark.parametrize(("family", "prompt_lengths"), SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy(family: str, prompt_lengths: tuple, temperature: float):
    prompts = [tiny.random_ids(n, seed=n) for n in prompt_lengths]
    completions = [[tiny.random_ids(n, seed=50 + n)] for n in (4, 7, 2)]
    lm = tiny.causal_lm(family, is_plain=True)
    batch = padded_batch(prompts, completions, 7).to(next(lm.parameters()).device)
    with torch.no_grad():
        ours = Policy(lm)(batch, temperature=temperature, with_entropy=True)
    token_logps, entropy = trl_code.scores(lm, batch, temperature)
    mask = batch.completion_mask
    assert ours.token_logps[mask].min() < -5, "the model is far from uniform"
    torch.testing.assert_close(ours.token_logps[mask], token_logps[mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy[mask], entropy[mask], rtol=1e-4, atol=1e-4)
