"""Claim: every loss is the formula it cites, in value, gradient and direction.

Targets are enumerations of small distributions, numbers worked by hand and gradients derived on
paper; `test_conformance.py` has golden cases of each. No loss depends on what stands under its
mask, nor on how the optimiser step is cut into micro-batches. About `common.losses`,
`common.objectives.policy` and `common.objectives.preference`.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import losses
from common.advantages import normalise_globally
from common.objectives.kinds import Advantages, PolicyObjective, PreferenceLoss
from common.objectives.policy.geometric_mask import geometric_mask
from common.objectives.policy.off_policy_mask import off_policy_mask
from common.objectives.policy.sampler_drift import sampler_drift
from common.objectives.policy.sampler_weights import CORRECTIONS, sampler_weights

LN2 = math.log(2)
SOFTPLUS_MINUS_1 = 0.31326168751822286  # -log sigma(1)
SOFTPLUS_1 = 1.3132616875182228  # -log sigma(-1)


def close(value: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        value, torch.as_tensor(expected, dtype=value.dtype), rtol=tolerance, atol=tolerance
    )


def preference_loss(text: str, logps: Sequence[Tensor], beta: float = 0.5) -> Tensor:
    """Loss (N,) of log-probs (N,): chosen and rejected, then both under the reference."""
    table = torch.stack([*logps], dim=-1)  # (N, 4)
    return PreferenceLoss.find(text)(table[:, :2], table[:, 2:], torch.ones(len(table), 2), beta)


def policy_loss(
    text: str, logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (B, C), and metrics, of a sampler that is the old policy."""
    return PolicyObjective.find(text)(logps, old, old, advantages, mask)


def test_sft_loss_by_hand_is_a_mean_over_tokens_and_ignores_padding():
    logps = torch.tensor([[-1.0, -2.0, -torch.inf], [-4.0, torch.nan, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss = losses.sft_loss(logps, mask, num_tokens=3)
    close(loss, 7 / 3)
    loss.backward()
    close(logps.grad, [[-1 / 3, -1 / 3, 0], [-1 / 3, 0, 0]])
    close(losses.sft_loss(logps, mask & False, num_tokens=0), 0.0)
    by_row = [losses.sft_loss(logps[i : i + 1], mask[i : i + 1], num_tokens=3) for i in (0, 1)]
    close(sum(by_row), 7 / 3)  # micro-batches add up: it is no mean of the rows' means


def test_bradley_terry_by_hand():
    chosen, rejected = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])
    close(losses.bradley_terry_loss(chosen, rejected), [SOFTPLUS_MINUS_1, SOFTPLUS_1, LN2])
    margin = torch.tensor([0.0, -2.0, 1.0])  # differences 1, -1, 0 become 1, 1, -1
    close(
        losses.bradley_terry_loss(chosen, rejected, margin=margin),
        [SOFTPLUS_MINUS_1, SOFTPLUS_MINUS_1, SOFTPLUS_1],
    )
    # It is the likelihood of the label, and survives extremes.
    difference = torch.tensor([0.7, -100.0, 100.0], requires_grad=True)
    loss = losses.bradley_terry_loss(difference, torch.zeros(3))
    probability = math.exp(0.7) / (math.exp(0.7) + 1)  # e^r_w / (e^r_w + e^r_l)
    close(loss, [-math.log(probability), 100.0, 0.0])
    loss.sum().backward()
    close(difference.grad, [probability - 1, -1.0, 0.0])


def test_centering_penalty_by_hand_pulls_both_rewards_alike():
    chosen = torch.tensor([2.0, -1.0], requires_grad=True)
    rejected = torch.tensor([1.0, 1.0], requires_grad=True)
    penalty = losses.centering_penalty(chosen, rejected)
    close(penalty, [9.0, 0.0])
    penalty.sum().backward()
    close(chosen.grad, [6.0, 0.0])
    close(rejected.grad, [6.0, 0.0])


# Two pairs, beta 0.5. Pair 0: D = (-10 + 14) - (-11 + 13) = 2, beta D = 1.
# Pair 1: D = (-8 + 6) - (-7 + 7) = -2, beta D = -1.
LOGPS = tuple(
    torch.tensor(values) for values in ([-10.0, -8.0], [-14.0, -6.0], [-11.0, -7.0], [-13.0, -7.0])
)


@pytest.mark.parametrize("flip_rate", [0.05, 0.3, 0.45])
def test_robust_loss_is_unbiased_under_flipped_labels_and_smoothing_is_not(flip_rate: float):
    chosen, rejected, ref_chosen, ref_rejected = LOGPS
    flipped = (rejected, chosen, ref_rejected, ref_chosen)
    clean = preference_loss("sigmoid", LOGPS)

    def mean_over_labels(loss_type: str) -> Tensor:
        text = f"{loss_type}:label_smoothing={flip_rate}"
        kept, swapped = (preference_loss(text, pairs) for pairs in (LOGPS, flipped))
        return (1 - flip_rate) * kept + flip_rate * swapped

    close(mean_over_labels("robust"), clean, 1e-5)
    assert (mean_over_labels("sigmoid") - clean).abs().min() > 0.01


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("loss_type", ["sigmoid", "robust", "ipo", "hinge"])
def test_each_loss_is_least_where_its_paper_says(loss_type: str, share: float):
    """Two completions of which a share prefers the first, and the best D worked out on paper.

    DPO: the log odds / beta. IPO (eq. 17): (share - 1/2) / beta. Hinge: the margin, for the
    majority. Robust: DPO's on the clean share, though the labels it sees are flipped at its rate.
    """
    beta, rate = 0.5, 0.1
    gaps = torch.linspace(-8, 8, 3201, dtype=torch.float64)
    zeros = torch.zeros_like(gaps)
    seen = share * (1 - rate) + (1 - share) * rate if loss_type == "robust" else share
    text = f"robust:label_smoothing={rate}" if loss_type == "robust" else loss_type
    kept, swapped = (preference_loss(text, [d, zeros, zeros, zeros], beta) for d in (gaps, -gaps))
    expected_loss = seen * kept + (1 - seen) * swapped
    log_odds = math.log(share / (1 - share))
    best = {"ipo": (share - 0.5) / beta, "hinge": math.copysign(1, share - 0.5) / beta}
    if loss_type == "hinge" and share == 0.5:
        flat = expected_loss[gaps.abs() <= 1 / beta]
        close(flat, torch.ones_like(flat))
    else:
        least = gaps[expected_loss.argmin()].item()
        assert abs(least - best.get(loss_type, log_odds / beta)) <= 0.005


PER_TOKEN = [name for name in PreferenceLoss.built_in() if PreferenceLoss.find(name).is_per_token]


@pytest.mark.parametrize("loss_type", PreferenceLoss.built_in())
def test_a_loss_per_token_is_that_of_means_and_the_others_know_no_lengths(loss_type: str):
    assert {"ipo_mean", "sft", "sigmoid_norm", "simpo"} <= {*PER_TOKEN}
    logps, ref_logps = torch.stack(LOGPS, dim=-1).split(2, dim=-1)  # (N, 2) each
    lengths, ones = torch.tensor([[5, 7], [2, 4]]), torch.ones(2, 2)
    loss = PreferenceLoss.find(loss_type)
    ours = loss(logps, ref_logps, lengths, 0.5)
    of_sums = loss(logps, ref_logps, ones, 0.5)
    if loss_type in PER_TOKEN:
        close(ours, loss(logps / lengths, ref_logps / lengths, ones, 0.5))
        assert (ours - of_sums).abs().min() > 0.1
    else:
        assert torch.equal(ours, of_sums)


VOCABULARY = 5


def softmax_table(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


def kl(first: Tensor, second: Tensor) -> Tensor:
    return (first * (first / second).log()).sum(-1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_over_all_sequences_of_two_tokens(estimator: str):
    """By enumeration: k1 and k3 have KL(pi || ref) of the sequence as mean, never the reverse."""
    pi_first, ref_first = softmax_table(seed=1), softmax_table(seed=2)
    pi_second, ref_second = softmax_table(VOCABULARY, seed=3), softmax_table(VOCABULARY, seed=4)
    pairs = list(itertools.product(range(VOCABULARY), repeat=2))
    logps = torch.stack([torch.stack([pi_first[a], pi_second[a, b]]) for a, b in pairs]).log()
    ref = torch.stack([torch.stack([ref_first[a], ref_second[a, b]]) for a, b in pairs]).log()
    weights = logps.sum(dim=1).exp()  # (25,) probability of each sequence under pi
    close(weights.sum(), 1.0, 1e-12)

    per_token = losses.kl_estimate(logps, ref, estimator=estimator)  # (25, 2)
    expectation = (weights[:, None] * per_token).sum()
    forward = kl(pi_first, ref_first) + (pi_first * kl(pi_second, ref_second)).sum()
    backward = kl(ref_first, pi_first) + (ref_first * kl(ref_second, pi_second)).sum()
    assert (forward - backward).abs() > 0.05, "the two directions differ in this example"
    if estimator == "k2":
        log_ratios = (logps.exp() / ref.exp()).log()
        close(expectation, (weights[:, None] * log_ratios.square() / 2).sum(), 1e-9)
        assert (expectation - forward).abs() > 1e-3, "k2 is biased"
    else:
        close(expectation, forward, 1e-9)
    if estimator != "k1":
        assert (per_token >= 0).all()


def test_k3_keeps_its_digits_near_zero():
    logps = torch.tensor([[-2.0]])
    for difference in (2.0**-10, -(2.0**-10), 2.0**-12):  # exact in float32 beside 2
        estimate = losses.kl_estimate(logps, logps + difference).item()
        exact = difference**2 / 2 + difference**3 / 6 + difference**4 / 24
        assert abs(estimate / exact - 1) < 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_times_the_ratio_an_estimate_has_the_gradient_of_the_kl(estimator: str):
    """Tokens drawn from an older policy; all enumerated. Without the ratio it is another one."""
    logits, ref = softmax_table(seed=5).log(), softmax_table(seed=6)
    old = softmax_table(seed=7)
    mask = torch.ones(1, VOCABULARY, dtype=torch.bool)
    leaves = [logits.clone().requires_grad_() for _ in range(3)]
    logps = [leaf.log_softmax(-1)[None] for leaf in leaves]
    kl(logps[0][0].exp(), ref).backward()
    for corrected, values in ((True, logps[1]), (False, logps[2])):
        per_token = losses.kl_estimate(values, ref.log()[None], estimator=estimator)
        if corrected:
            per_token = per_token * losses.probability_ratio(values, old.log()[None], mask)
        (old * per_token[0]).sum().backward()
    close(leaves[1].grad, leaves[0].grad, 1e-10)
    assert (leaves[2].grad - leaves[0].grad).abs().max() > 0.05


def test_sampler_weights_by_hand():
    # Ratios 4, 1, 1/8 and, under the mask, e^5: product 1/2. Then 2 and 1: product 2.
    log_ratio = torch.tensor([[2 * LN2, 0.0, -3 * LN2, 5.0], [LN2, 0.0, 5.0, 5.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    sampled, loss = torch.full((2, 4), -2.0), torch.where(mask, 3.0, 0.0)
    old = (sampled + log_ratio).requires_grad_()

    def weights_of(function=sampler_weights, **settings):
        weighted, metrics = function(loss, old, sampled, mask, **settings)
        weights = metrics["sampler_weight"]
        assert not weights.requires_grad
        close(weighted, loss * weights)
        return weights

    expected = {
        "token_truncate": [[3.0, 1.0, 0.125], [2.0, 1.0]],
        "token_mask": [[0.0, 1.0, 0.0], [2.0, 1.0]],
        "sequence_truncate": [[0.5] * 3, [2.0] * 2],
        "sequence_mask": [[0.5] * 3, [2.0] * 2],
    }
    assert set(expected) == set(CORRECTIONS)
    for correction, rows in expected.items():
        weights = weights_of(correction=correction, cap=3.0)
        for row, kept, values in zip(weights, mask, rows, strict=True):
            close(row[kept], values)
    close(weights_of(cap=1.5, correction="sequence_truncate")[:, 0], [0.5, 1.5])
    close(weights_of(cap=1.5, correction="sequence_mask")[:, 0], [0.0, 0.0])
    close(weights_of(cap=1.5, correction="sequence_mask", floor=0.4)[:, 0], [0.5, 0.0])
    for high, low, kept in ((2.0, 0.5, [1, 1]), (1.3, 0.7, [1, 0]), (1.5, 0.8, [0, 1])):
        close(weights_of(geometric_mask, high=high, low=low)[:, 0], kept)  # means 0.79 and 1.41


def test_a_negative_advantage_far_from_the_sampler_is_left_out():
    # Mean gaps sampler - policy of 0.2, 0.2, 0.05 and, with what is masked, far above.
    sampled = torch.full((4, 3), -1.0)
    gaps = torch.tensor(
        [[0.6, -0.2, 0.2], [0.2, 0.2, 0.2], [0.0, 0.1, 9.0], [0.05, 9.0, torch.nan]]
    )
    logps = (sampled - gaps).requires_grad_()
    mask = torch.arange(3) < torch.tensor([3, 3, 2, 1])[:, None]
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand(4, 3)

    def kept(logps: Tensor, advantages: Tensor, threshold: float) -> list[list[bool]]:
        ones = torch.ones(4, 3)
        loss, metrics = off_policy_mask(ones, logps, sampled, advantages, mask, threshold=threshold)
        close(loss, 1.0 - metrics["off_policy_fraction"].float())
        return loss.bool().tolist()

    assert kept(logps, advantages, 0.1) == [[False] * 3, [True] * 3, [True] * 3, [True] * 3]
    everything = [[True] * 3] * 4
    assert kept(logps, advantages, 0.21) == everything
    # a policy that has come to prefer what was sampled is not far
    assert kept(2 * sampled - logps, advantages, 0.1) == everything
    of_tokens = torch.tensor([[-1.0, 0.0, 1.0]]).expand(4, 3)
    assert kept(logps, of_tokens, 0.1) == [[False, True, True]] * 2 + [[True] * 3] * 2


def test_drift_pulls_the_log_prob_back_to_that_of_the_sampler():
    sampled = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    logps = torch.tensor([[-1.5, -2.0, -1.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    loss = sampler_drift(torch.ones(1, 4), logps, sampled, mask, coef=0.5)
    close(loss, [[1.125, 1.0, 3.0, 1.0]])
    loss.sum().backward()
    close(logps.grad, [[-0.5, 0.0, 2.0, 0.0]])


# ratio, advantage, objective -> loss, d loss / d log pi (-ratio A where no bound is active)
CLIPPING = [
    (1.1, 1.0, "clip", -1.1, -1.1),
    (1.5, 1.0, "clip", -1.2, 0.0),
    (1.5, -1.0, "clip", 1.5, 1.5),
    (0.5, 1.0, "clip", -0.5, -0.5),
    (0.5, -1.0, "clip", 0.8, 0.0),
    (1.25, 2.0, "clip:epsilon_high=0.28", -2.5, -2.5),
    (1.3, 2.0, "clip:epsilon_high=0.28", -2.56, 0.0),
    (0.75, -2.0, "clip:epsilon_high=0.28", 1.6, 0.0),
    (0.75, -2.0, "clip:epsilon_low=0.3", 1.5, 1.5),
    (0.6, -2.0, "clip:epsilon_low=0.3", 1.4, 0.0),
    (1.25, 2.0, "clip:epsilon_low=0.3", -2.4, 0.0),
    (2.5, -1.0, "clip:delta=3.0", 2.5, 2.5),
    (4.0, -1.0, "clip:delta=3.0", 3.0, 0.0),
    (4.0, -1.0, "clip", 4.0, 4.0),
    (4.0, 1.0, "clip:delta=3.0", -1.2, 0.0),
    (0.5, -1.0, "clip:delta=3.0", 0.8, 0.0),
    (4.0, 0.0, "clip:delta=3.0", 0.0, 0.0),
]


# ratio, advantage -> loss, d loss / d log pi, with log pi = -1.3 + log ratio and epsilon_high 0.2
CISPO = [
    (1.0, 1.0, 1.3, -1.0),
    (0.5, -2.0, 2 * 0.5 * (-1.3 - LN2), 2 * 0.5),
    (0.1, 1.0, -0.1 * (-1.3 + math.log(0.1)), -0.1),  # nothing bounds the ratio from below
    (4.0, 1.0, -1.2 * (-1.3 + 2 * LN2), -1.2),
    (4.0, -1.0, 1.2 * (-1.3 + 2 * LN2), 1.2),
]

# ratio, advantage -> loss, d loss / d log pi, with temperatures 1 and 2; sigma(ln 3) = 3/4, so that
# f = 4/tau 3/4 and f' = 4 3/4 1/4 = 3/4 at tau (rho - 1) = ln 3; at rho = 1 they are 2/tau and 1.
LN3 = math.log(3)
SAPO = [
    (1.0, 1.0, -2.0, -1.0),
    (1.0, -3.0, 3.0, 3.0),
    (1 + LN3, 2.0, -6.0, -2 * 0.75 * (1 + LN3)),
    (1 + LN3 / 2, -2.0, 3.0, 2 * 0.75 * (1 + LN3 / 2)),
    (1 - LN3 / 2, -2.0, 1.0, 2 * 0.75 * (1 - LN3 / 2)),
    (1.7, 0.0, 0.0, 0.0),
]

# pi, mu, advantage, objective -> weight of -A log pi. The bounds are on pi - mu, not on pi / mu.
DPPO = [
    (0.75, 0.5, 1.0, "dppo", 0.0),  # has risen by more than 0.2
    (0.75, 0.5, -1.0, "dppo", 1.5),
    (0.25, 0.5, -1.0, "dppo", 0.0),  # has fallen by more than 0.2
    (0.25, 0.5, 1.0, "dppo", 0.5),
    (0.75, 0.5, 1.0, "dppo:epsilon_high=0.3", 1.5),
    (0.25, 0.5, -1.0, "dppo:epsilon_high=0.3", 0.0),
    (0.25, 0.5, -1.0, "dppo:epsilon_low=0.3", 0.5),
    (0.1, 0.001, 1.0, "dppo", 100.0),  # a rare token, which every clip of the ratio stops
    (0.1, 0.001, 1.0, "dppo:delta=20.0", 20.0),
    (0.1, 0.001, -1.0, "dppo:delta=20.0", 20.0),
    (0.75, 0.5, 1.0, "dppo:delta=20.0", 0.0),
]

# log mu, ratio, advantage, loss, d loss / d log pi, whether it is clipped, objective
BY_HAND = [  # clipped tokens are those without a gradient that have an advantage
    *((-1.3, r, a, loss, d, d == 0 and a != 0, text) for r, a, text, loss, d in CLIPPING),
    *((-1.3, *case, case[0] > 1.2, "cispo") for case in CISPO),
    *((-1.3, *case, False, "sapo:tau_pos=1,tau_neg=2") for case in SAPO),
    *(
        (math.log(mu), p / mu, a, -a * w * math.log(p), -a * w, w != pytest.approx(p / mu), text)
        for p, mu, a, text, w in DPPO
    ),
]


@pytest.mark.parametrize(
    ("old_logp", "ratio", "advantage", "loss", "slope", "is_clipped", "objective"), BY_HAND
)
def test_an_objective_by_hand(old_logp, ratio, advantage, loss, slope, is_clipped, objective):
    """One token with log pi = old + log ratio, and one under the mask."""
    mask = torch.tensor([[True, False]])
    old = torch.tensor([[old_logp, torch.nan]])
    logps = torch.tensor([[old_logp + math.log(ratio), 0.0]], requires_grad=True)
    ours, metrics = policy_loss(objective, logps, old, torch.tensor([advantage]), mask)
    close(ours, [[loss, 0.0]])
    ours.sum().backward()
    close(logps.grad, [[slope, 0.0]])
    if not objective.startswith("sapo"):  # which has no bound
        assert metrics["clip_fraction"].tolist() == [[is_clipped, False]]


def test_a_token_without_advantage_up_to_rounding_is_not_clipped():
    # The second reward of each group is its mean, which float32 misses; the last group is flat.
    rewards = torch.tensor([[0.1, 0.2, 0.3], [5.1, 5.3, 5.5], [1.0, 1.0, 1.0]])
    in_group, everywhere = Advantages.find("group")(rewards), torch.ones(3, 3, dtype=torch.bool)
    for advantages in (in_group, normalise_globally(in_group, everywhere, lambda sums: sums)):
        assert bool((advantages[:2, 1] != 0).all())
        terms = (torch.full((9, 1), 1.0), torch.zeros(9, 1), advantages.flatten())
        _, metrics = policy_loss("clip", *terms, torch.ones(9, 1, dtype=torch.bool))
        assert metrics["clip_fraction"].flatten().nonzero().flatten().tolist() == [2, 5]


SEQUENCE_CLIP = "gspo:epsilon_low=0.2,epsilon_high=0.2"  # with the bounds of `clip`
BY_LEVEL = ("clip", SEQUENCE_CLIP)


def test_the_clip_acts_on_the_ratio_of_each_level():
    # Ratios 4 and 1, geometric mean 2: at token level only the first is above 1.2. Then 1 and 1.
    log_ratio = torch.tensor([[2 * LN2, 0.0, 5.0], [0.0, 0.0, 5.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    old, ones = torch.full((2, 3), -6.0), torch.ones(2)
    terms = (old + log_ratio, old)

    def clipped(text: str, advantages: Tensor) -> list[list[bool]]:
        return policy_loss(text, *terms, advantages, mask)[1]["clip_fraction"].tolist()

    assert clipped("clip", ones) == [[True, False, False], [False, False, False]]
    assert clipped("gspo", ones) == [[True, True, False], [False, False, False]]
    for delta, expected in ((math.inf, False), (1.9, True), (2.1, False)):
        capped = clipped(f"{SEQUENCE_CLIP},delta={delta}", -ones)
        assert capped[0] == [expected, expected, False]
    by_level = [policy_loss(text, *terms, -ones, mask)[0] for text in BY_LEVEL]
    close(torch.stack(by_level)[:, 0], [[4.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    gain, _ = policy_loss(SEQUENCE_CLIP, *terms, ones, mask)
    close(gain[0], [-1.2, -1.2, 0.0])


def test_token_advantages_are_used_token_by_token():
    advantages = torch.tensor([[1.0, -2.0, 3.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    for text in BY_LEVEL:
        logps = torch.zeros(1, 3, requires_grad=True)
        loss, _ = policy_loss(text, logps, logps, advantages, mask)
        close(loss, [[-1.0, 2.0, -3.0]])
        loss.sum().backward()
        close(logps.grad, [[-1.0, 2.0, -3.0]])


def test_nothing_under_the_mask_reaches_value_or_gradient():
    logps = torch.tensor([[-1.0, -1.0], [0.0, -torch.inf]], requires_grad=True)
    old = torch.tensor([[-1.0, -500.0], [-torch.inf, torch.nan]])
    mask = torch.tensor([[True, False], [False, False]])
    for text in BY_LEVEL:
        logps.grad = None
        per_token, _ = policy_loss(text, logps, old, torch.ones(2), mask)
        close(per_token, [[-1.0, 0.0], [0.0, 0.0]])
        losses.aggregate(per_token, mask).backward()
        close(logps.grad, [[-0.5, 0.0], [0.0, 0.0]])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    cuts=st.sets(st.integers(1, 7), max_size=7),
    seed=st.integers(0, 1000),
)
def test_micro_batches_add_up_under_global_denominators(lengths, cuts, seed):
    """Any cut into micro-batches, also through a prompt's group, with any padding to the right."""
    values = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).double()
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    tokens_of_prompt = torch.tensor(lengths).view(2, 4).sum(1).repeat_interleave(4)  # (B,)
    whole = {
        "grpo": sum(v[m].sum() / max(m.sum(), 1) for v, m in zip(values, mask, strict=True)) / 8,
        "token": values[mask].sum() / max(mask.sum(), 1),
        "constant": values[mask].sum() / (8 * 7),
        "prompt": sum(
            values[i : i + 4][mask[i : i + 4]].sum() / max(mask[i : i + 4].sum(), 1) for i in (0, 4)
        )
        / 2,
    }
    alone = losses.aggregate(values, mask, aggregation="prompt", num_generations=4)
    close(alone, whole["prompt"], 1e-12)
    bounds = [0, *sorted(cuts), 8]
    for aggregation, expected in whole.items():
        total = torch.zeros((), dtype=torch.float64)
        for start, end in itertools.pairwise(bounds):
            num_columns = max(*lengths[start:end], 0, 1)  # each micro-batch is padded to its own
            total += losses.aggregate(
                values[start:end, :num_columns],
                mask[start:end, :num_columns],
                aggregation=aggregation,
                num_sequences=torch.tensor(8),
                num_tokens=tokens_of_prompt[start:end] if aggregation == "prompt" else mask.sum(),
                max_length=7,
                num_prompts=2,
            )
        close(total, expected, 1e-12)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_nothing_to_count_is_zero_and_has_a_zero_gradient(aggregation: str):
    per_token = torch.full((2, 3), torch.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = losses.aggregate(per_token, mask, aggregation=aggregation)
    close(loss, 0.0)
    loss.backward()
    close(per_token.grad, torch.zeros(2, 3))


OBJECTIVES = ("clip", "gspo", "cispo", "sapo", "dppo")


def test_half_precision_is_raised_to_float32():
    half, mask = torch.full((2, 3), -1.0, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bool)
    row = half[:, 0]
    results = [
        losses.sft_loss(half, mask, num_tokens=6),
        losses.bradley_terry_loss(row, row),
        losses.kl_estimate(half, half),
        losses.aggregate(half, mask),
        *(preference_loss(name, [row] * 4) for name in PreferenceLoss.built_in()),
        *(policy_loss(text, half, half, row, mask)[0] for text in OBJECTIVES),
    ]
    assert {result.dtype for result in results} == {torch.float32}


def test_unusable_options_are_refused_with_the_values_allowed():
    logps, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    preference = functools.partial(preference_loss, logps=[torch.zeros(1)] * 4)
    policy = functools.partial(
        policy_loss, logps=logps, old=logps, advantages=torch.ones(1), mask=mask
    )
    refusals = [
        (lambda: preference("dpo"), "'dpo'.*sigmoid"),
        (lambda: losses.kl_estimate(logps, logps, estimator="k4"), "'k4'.*k1, k2, k3"),
        (lambda: policy("cispo:ratio_level=word"), "'word'.*token, sequence"),
        (lambda: policy("sapo:ratio_level=word"), "'word'.*token, sequence"),
        (lambda: policy("clip:delta=1.2"), "delta is 1.2 but must exceed"),
        (
            lambda: sampler_weights(logps, logps, logps, mask, correction="tis", cap=2.0),
            "'tis'.*token_truncate",
        ),
        (lambda: losses.aggregate(logps, mask, aggregation="mean"), "'mean'.*grpo"),
    ]
    for call, message in refusals:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("loss_type", ["sigmoid", "robust", "simpo", "sigmoid_norm"])
def test_a_share_of_wrong_labels_that_is_no_minority_is_refused(loss_type: str):
    for share in (0.5, -0.1):
        with pytest.raises(ValueError, match=f"label_smoothing is {share} but must lie in"):
            preference_loss(f"{loss_type}:label_smoothing={share}", LOGPS)
    assert preference_loss(f"{loss_type}:label_smoothing=0.49", LOGPS).isfinite().all()


BOUNDS = [(name, bound) for name in ("clip", "gspo", "dppo") for bound in ("low", "high")]


@pytest.mark.parametrize(("objective", "bound"), [*BOUNDS, ("cispo", "high")])
def test_a_bound_below_0_is_refused(objective: str, bound: str):
    logps, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    terms = (logps, logps, torch.ones(1), mask)
    with pytest.raises(ValueError, match=rf"epsilon_{bound} is -0\.1 but must be at least 0"):
        policy_loss(f"{objective}:epsilon_{bound}=-0.1", *terms)
    loss, _ = policy_loss(f"{objective}:epsilon_{bound}=0", *terms)
    assert loss.isfinite().all()


@pytest.mark.parametrize("gap", [100.0, -200.0, 1e6])
@pytest.mark.parametrize("level", losses.RATIO_LEVELS)
def test_a_policy_that_has_gone_far_has_finite_ratios_and_gradients(gap: float, level: str):
    """Beyond a ratio of e^88 float32 is infinite, and infinity times an advantage of 0 is nan."""
    logps = torch.tensor([[gap, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True]])
    ratio = losses.probability_ratio(logps, torch.zeros(1, 2), mask, ratio_level=level)
    (ratio.float() * torch.tensor([[0.0, 1.0]])).sum().backward()
    assert ratio.float().isfinite().all()
    assert logps.grad.isfinite().all()


@pytest.mark.parametrize("level", losses.RATIO_LEVELS)
def test_a_ratio_gives_the_old_log_probs_no_gradient(level: str):
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old_logps = torch.tensor([[-1.5, -1.8]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses.probability_ratio(logps, old_logps, mask, ratio_level=level).sum().backward()
    assert old_logps.grad is None
    assert (logps.grad != 0).all()


def test_a_win_is_1_and_a_tie_half_by_hand():
    first, second = torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2.0])
    assert losses.wins(first, second).tolist() == [1.0, 0.5, 0.0]
    assert [losses.wins(*pair) for pair in ((2, 1), (1, 1), (1, 2))] == [1, 0.5, 0]


def test_a_bound_on_the_ratio_counts_where_the_advantage_is_more_than_rounding():
    ratio, bounded, mask = torch.full((1, 4), 2.0), torch.ones(1, 4), torch.ones(1, 4) > 0
    advantages = torch.tensor([[0.9e-5, 1.1e-5, -0.9e-5, -1.1e-5]])
    clipped = losses.clipped_tokens(bounded, ratio, advantages, mask)
    assert clipped.tolist() == [[False, True, False, True]]
