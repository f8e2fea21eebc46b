"""Claim: where TRL is right, every loss here is TRL's, in value and in gradient.

Both sides are given the same float64 tensors: rows of different lengths, ratios on both sides of
every bound. TRL's side is TRL's own code (see `trl_code`), never a copy of its formulas. Where TRL
and the papers part is in test_disagreements.py.
"""

from typing import Any

import pytest
import tiny
import torch
import trl_code
from torch import Tensor

from common import losses
from common.advantages import group_advantages, normalise_globally
from common.forward import Policy
from common.objectives.kinds import Advantages, PolicyObjective
from common.objectives.policy.off_policy_mask import off_policy_mask
from common.objectives.policy.sampler_weights import CORRECTIONS, sampler_weights
from common.padding import padded_batch

NUM_ROWS, NUM_COLUMNS = 12, 6
MASK = torch.arange(NUM_COLUMNS) < torch.tensor([6, 1, 3, 4, 2, 6, 5, 1, 6, 2, 3, 4])[:, None]
LENGTHS = MASK.sum(1)


def random_logps(seed: int) -> Tensor:
    """(B, C) log-probs, float64."""
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(NUM_ROWS, NUM_COLUMNS, generator=generator, dtype=torch.float64)


def near(logps: Tensor, seed: int, spread: float = 0.5) -> Tensor:
    """Log-probs some way off the given ones, to either side."""
    generator = torch.Generator().manual_seed(seed)
    return logps + spread * torch.randn(logps.shape, generator=generator, dtype=torch.float64)


REF = random_logps(0)
OLD = near(REF, 1)
ADVANTAGES = torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(2)).double()


def policy_logps() -> Tensor:
    """(B, C) log-probs with a gradient to compare."""
    return near(OLD, 3).requires_grad_()


def assert_same(ours: Tensor, trl: Tensor, logps: Tensor) -> None:
    """Two losses of the same log-probs agree, and so do their gradients, which are not zero."""
    torch.testing.assert_close(ours, trl.to(ours.dtype), rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(loss, logps, retain_graph=True)[0] for loss in (ours, trl)]
    assert gradients[1].abs().max() > 1e-4
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


# ---- SFT and the reward model --------------------------------------------------------------------


def test_sft_over_two_micro_batches():
    logps = policy_logps()
    halves, num_tokens = (slice(0, 5), slice(5, None)), MASK.sum()
    ours = sum(losses.sft_loss(logps[h], MASK[h], num_tokens=num_tokens) for h in halves)
    trl = sum(trl_code.sft_loss(logps[h], MASK[h], num_tokens) for h in halves)
    assert_same(ours, trl, logps)


MARGINS = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.1, 0.3]).double()


@pytest.mark.parametrize(("margin", "centering"), [(None, None), (MARGINS, None), (None, 0.1)])
def test_reward_model(margin: Tensor | None, centering: float | None):
    rewards = policy_logps()[:, 0]
    chosen, rejected = rewards.chunk(2)
    ours = losses.bradley_terry_loss(chosen, rejected, margin=margin).mean()
    if centering:
        ours = ours + centering * losses.centering_penalty(chosen, rejected).mean()
    assert_same(ours, trl_code.reward_loss(rewards, margin, centering), rewards)


# ---- preference losses ---------------------------------------------------------------------------


def pair_sums(token_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Summed log-probs of the chosen (the first half of the rows) and of the rejected, (N,)."""
    chosen, rejected = losses.masked_sum(token_logps, MASK, dim=1).chunk(2)
    return chosen, rejected


PAIR_LENGTHS = dict(zip(("chosen_lengths", "rejected_lengths"), LENGTHS.chunk(2), strict=True))
DPO = [
    ({"loss_type": "sigmoid"}, {"loss_types": ["sigmoid"]}),
    ({"loss_type": "hinge"}, {"loss_types": ["hinge"]}),
    ({"loss_type": "ipo_mean", **PAIR_LENGTHS}, {"loss_types": ["ipo"]}),
    ({"loss_type": "sigmoid_norm", **PAIR_LENGTHS}, {"loss_types": ["sigmoid_norm"]}),
    (
        {"loss_type": "robust", "label_smoothing": 0.2},
        {"loss_types": ["robust"], "label_smoothing": 0.2},
    ),
]


@pytest.mark.parametrize(("options", "settings"), DPO, ids=lambda o: o.get("loss_type", ""))
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo(options: dict, settings: dict, beta: float):
    logps = policy_logps()
    pairs = (*pair_sums(logps), *pair_sums(REF))
    ours = losses.preference_loss(*pairs, beta=beta, **options).mean()
    assert_same(ours, trl_code.dpo_loss(logps, REF, MASK, beta=beta, **settings), logps)


def test_dpo_with_an_sft_term():
    logps = policy_logps()
    pairs = (*pair_sums(logps), *pair_sums(REF))
    chosen, chosen_mask = logps[: NUM_ROWS // 2], MASK[: NUM_ROWS // 2]
    sft = losses.sft_loss(chosen, chosen_mask, num_tokens=chosen_mask.sum())
    ours = losses.preference_loss(*pairs, beta=0.3).mean() + 0.4 * sft
    settings = {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]}
    assert_same(ours, trl_code.dpo_loss(logps, REF, MASK, beta=0.3, **settings), logps)


WITHOUT_REFERENCE = [
    ({"loss_type": "sigmoid", "label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    ({"loss_type": "ipo"}, {}),
    ({"loss_type": "hinge"}, {}),
    ({"loss_type": "simpo", "gamma": 0.5}, {"simpo_gamma": 0.5}),
    (
        {"loss_type": "simpo", "gamma": 0.5, "label_smoothing": 0.1},
        {"simpo_gamma": 0.5, "label_smoothing": 0.1},
    ),
]


@pytest.mark.parametrize(("options", "settings"), WITHOUT_REFERENCE)
def test_losses_of_trls_cpo_are_ours_without_a_reference(options: dict, settings: dict):
    """Smoothing and the summed IPO, which TRL's DPO does not have, and SimPO, per pair."""
    logps = policy_logps()
    chosen, rejected = pair_sums(logps)
    of_trl = (chosen, rejected)
    if options["loss_type"] == "simpo":  # TRL wants log-probs per token, ours divides
        of_trl = tuple(x / n for x, n in zip(of_trl, PAIR_LENGTHS.values(), strict=True))
        options = options | PAIR_LENGTHS
    no_reference = [torch.zeros_like(chosen)] * 2
    ours = losses.preference_loss(chosen, rejected, *no_reference, beta=0.7, **options)
    settings = settings | {"loss_type": options["loss_type"], "beta": 0.7}
    trl = trl_code.cpo_losses(*of_trl, **settings)
    torch.testing.assert_close(ours, trl, rtol=1e-10, atol=1e-12)
    assert_same(ours.mean(), trl.mean(), logps)


# ---- policy losses -------------------------------------------------------------------------------


def trl_loss(logps: Tensor, ref: Tensor | None = None, **settings: Any) -> Tensor:
    """TRL's loss of all rows, sampled with the log-probs OLD."""
    stand_in = trl_code.grpo_trainer(logps, **settings)
    older = {"old_per_token_logps": OLD, "ref_per_token_logps": ref}
    return trl_code.grpo_loss(stand_in, ADVANTAGES, MASK, **older)


AGGREGATIONS = [
    ("grpo", {}, {"loss_type": "grpo"}),
    ("token", {}, {"loss_type": "bnpo"}),
    ("token", {}, {"loss_type": "dapo"}),
    ("constant", {"max_length": 9}, {"loss_type": "dr_grpo", "max_completion_length": 9}),
]
CLIPS = [
    ({}, {}),
    ({"epsilon_low": 0.1, "epsilon_high": 0.28}, {"epsilon_low": 0.1, "epsilon_high": 0.28}),
    ({"delta": 1.5}, {"args": {"delta": 1.5}}),
]


@pytest.mark.parametrize("ratio_level", losses.RATIO_LEVELS)
@pytest.mark.parametrize(("clip", "trl_clip"), CLIPS)
@pytest.mark.parametrize(("aggregation", "lengths", "loss_type"), AGGREGATIONS)
def test_grpo(
    ratio_level: str, clip: dict, trl_clip: dict, aggregation: str, lengths: dict, loss_type: dict
):
    logps = policy_logps()
    per_token = losses.policy_loss(logps, OLD, ADVANTAGES, MASK, ratio_level=ratio_level, **clip)
    ours = losses.aggregate(per_token, MASK, aggregation=aggregation, **lengths)
    settings = {"importance_sampling_level": ratio_level, **trl_clip, **loss_type}
    assert_same(ours, trl_loss(logps, **settings), logps)

    (gradient,) = torch.autograd.grad(ours, logps)  # these tensors put every bound to work
    was_clipped = (gradient == 0) & MASK
    assert 0 < was_clipped.sum() < MASK.sum()


def test_every_clip_of_these_tests_changes_the_loss():
    values = {
        losses.policy_loss(policy_logps(), OLD, ADVANTAGES, MASK, ratio_level=level, **clip)
        .sum()
        .item()
        for level in losses.RATIO_LEVELS
        for clip, _ in CLIPS
    }
    assert len(values) == len(losses.RATIO_LEVELS) * len(CLIPS)


def test_grpo_with_one_update_per_rollout():
    """Without old log-probs TRL takes the policy's own, without their gradient."""
    logps = policy_logps()
    ours = losses.aggregate(losses.policy_loss(logps, logps, ADVANTAGES, MASK), MASK)
    trl = trl_code.grpo_loss(trl_code.grpo_trainer(logps), ADVANTAGES, MASK)
    assert_same(ours, trl, logps)


@pytest.mark.parametrize(("aggregation", "lengths", "loss_type"), AGGREGATIONS)
def test_grpo_with_kl_to_a_reference(aggregation: str, lengths: dict, loss_type: dict):
    logps = policy_logps()
    per_token = losses.policy_loss(logps, OLD, ADVANTAGES, MASK)
    per_token = per_token + 0.3 * losses.kl_estimate(logps, REF, estimator="k3")
    ours = losses.aggregate(per_token, MASK, aggregation=aggregation, **lengths)
    assert_same(ours, trl_loss(logps, REF, beta=0.3, **loss_type), logps)


def test_dapo_over_two_micro_batches_of_one_step():
    """Uneven halves: 16 and 27 tokens, one mean over 43."""
    logps = policy_logps()
    halves, num_tokens = (slice(0, 5), slice(5, None)), MASK.sum()
    per_token = losses.policy_loss(logps, OLD, ADVANTAGES, MASK)
    ours = sum(
        losses.aggregate(per_token[h], MASK[h], aggregation="token", num_tokens=num_tokens)
        for h in halves
    )
    settings = {"loss_type": "dapo", "current_gradient_accumulation_steps": 2}
    settings["args"] = {"steps_per_generation": 2}
    trl = sum(
        trl_code.grpo_loss(
            trl_code.grpo_trainer(logps[h], **settings),
            ADVANTAGES[h],
            MASK[h],
            old_per_token_logps=OLD[h],
            num_items_in_batch=num_tokens,
        )
        for h in halves
    )
    assert_same(ours, trl, logps)


def test_share_of_clipped_tokens():
    logps = policy_logps()
    stand_in = trl_code.grpo_trainer(logps, epsilon_high=0.28)
    trl_code.grpo_loss(stand_in, ADVANTAGES, MASK, old_per_token_logps=OLD)
    (share,) = stand_in._metrics["train"]["clip_ratio/region_mean"]
    objective = PolicyObjective.find(["clip"], epsilon_high=0.28)
    clipped = objective(logps, OLD, OLD, ADVANTAGES, MASK)[1]["clip_fraction"]
    assert 0 < clipped.sum().item() / MASK.sum().item() == pytest.approx(share)


SOFT = [
    # TRL's `epsilon_high` is the bound itself; ours, as the paper's, is its distance from 1.
    ({"name": "cispo", "epsilon_high": 0.28}, {"epsilon_high": 1.28}, "token"),
    (
        {"name": "sapo", "tau_pos": 0.5, "tau_neg": 1.5},
        {"args": {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 1.5}},
        "grpo",
    ),
]


@pytest.mark.parametrize("ratio_level", losses.RATIO_LEVELS)
@pytest.mark.parametrize(("options", "settings", "aggregation"), SOFT, ids=["cispo", "sapo"])
def test_cispo_and_sapo(options: dict, settings: dict, aggregation: str, ratio_level: str):
    logps = policy_logps()
    bounds = {name: value for name, value in options.items() if name != "name"}
    objective = PolicyObjective.find([options["name"]], **bounds, ratio_level=ratio_level)
    per_token, _ = objective(logps, OLD, OLD, ADVANTAGES, MASK)
    ours = losses.aggregate(per_token, MASK, aggregation=aggregation)
    settings = settings | {"importance_sampling_level": ratio_level}
    assert_same(ours, trl_loss(logps, loss_type=options["name"], **settings), logps)


def test_completions_far_from_the_sampler_are_left_out():
    """TRL compares with the sampler's log-probs, as DeepSeek-V3.2 does."""
    logps, sampled = policy_logps(), near(OLD, 5, spread=0.2)
    loss = losses.policy_loss(logps, OLD, ADVANTAGES, MASK)
    of_tokens = ADVANTAGES[:, None].expand_as(loss)
    per_token, metrics = off_policy_mask(loss, logps, sampled, of_tokens, MASK, threshold=0.05)
    assert 0 < metrics["off_policy_fraction"][:, 0].sum() < (ADVANTAGES < 0).sum()
    stand_in = trl_code.grpo_trainer(logps, off_policy_mask_threshold=0.05)
    behind = {"old_per_token_logps": OLD, "sampling_per_token_logps": sampled}
    trl = trl_code.grpo_loss(stand_in, ADVANTAGES, MASK, **behind)
    assert_same(losses.aggregate(per_token, MASK), trl, logps)


def test_kl_corrected_for_older_samples():
    logps = policy_logps()
    kl = losses.kl_estimate(logps, REF) * losses.probability_ratio(logps, OLD, MASK)
    per_token = losses.policy_loss(logps, OLD, ADVANTAGES, MASK) + 0.3 * kl
    trl = trl_loss(logps, REF, beta=0.3, args={"use_bias_correction_kl": True})
    assert_same(losses.aggregate(per_token, MASK), trl, logps)


# ---- advantages ----------------------------------------------------------------------------------

REWARDS = torch.tensor(
    [[1.0, 0.0, 0.5, 2.0], [3.0, 3.0, 3.0, -1.0], [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0]]
)


@pytest.mark.parametrize(
    ("scale", "baseline", "trainer"),
    [
        *((scale, "mean", trl_code.GRPOTrainer) for scale in ("group", "batch", "none")),
        ("none", "leave_one_out", trl_code.RLOOTrainer),
    ],
)
def test_group_advantages(scale: str, baseline: str, trainer: type):
    ours = group_advantages(REWARDS, scale=scale, baseline=baseline)
    trl = trl_code.advantages(REWARDS, trainer, scale_rewards=scale)
    assert ours.abs().max() > 0.5
    torch.testing.assert_close(ours, trl, rtol=1e-5, atol=1e-6)


def test_gdpo():
    """Three functions, one of which applies to no completion of the second prompt."""
    rewards = torch.stack([REWARDS, REWARDS.flip(0).square(), REWARDS.roll(1, 1)])
    weights = [1.0, 0.3, -0.5]
    filled = rewards.clone()
    rewards[2, 1], filled[2, 1] = torch.nan, 0.0
    summed = Advantages.find(["gdpo"])(filled, weights)
    ours = normalise_globally(summed, torch.ones_like(summed).bool(), lambda sums: sums)
    trl = trl_code.advantages(REWARDS, **trl_code.by_function(rewards, weights))
    torch.testing.assert_close(ours, trl, rtol=1e-5, atol=1e-5)
    assert (ours - summed).abs().max() > 0.1  # the batch counts


def test_kl_in_the_reward_is_trls_rloo():
    """The sum of k1 over the completion, times beta, leaves the reward before the baseline does."""
    rewards = REWARDS[:3]
    logps, ref = OLD.float(), REF.float()
    k1 = losses.kl_estimate(logps, ref, estimator="k1").sum(dim=1)  # (B,): every token counts
    charged = rewards - 0.2 * k1.view_as(rewards)
    assert (charged - rewards).abs().max() > 0.1
    ours = group_advantages(charged, scale="none", baseline="leave_one_out")
    given = {"token_logps": logps, "ref_token_logps": ref, "beta": 0.2}
    trl = trl_code.advantages(rewards, trl_code.RLOOTrainer, **given)
    torch.testing.assert_close(ours, trl, rtol=1e-5, atol=1e-5)


# ---- importance weights --------------------------------------------------------------------------


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_weights_of_another_sampler(correction: str):
    """Every token counts; TRL's weights of completions are (B, 1)."""
    sampled = near(REF, 4, spread=0.2)
    everything = torch.ones_like(MASK)
    _, metrics = sampler_weights(REF, REF, sampled, everything, correction=correction, cap=1.3)
    ours = metrics["sampler_weight"]
    outputs = trl_code.rollout(
        REWARDS[:3],
        token_logps=REF.float(),
        sampling_token_logps=sampled.float(),
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


# ---- log-probabilities ---------------------------------------------------------------------------

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
