"""Claim: of each objective it is known where it ends, and those that should reach the optimum do.

The optimum of E[r] - beta KL(pi || ref) is ref exp(r / beta) / Z. On policies so small that every
expectation is a sum, each objective is trained to its end: some reach the optimum, others end at a
point that is derived here on paper. The distances that docs/objectives.md shows of all of them are
those of the code. They are total variation. About `experiments.evidence.optimum`.
"""

import functools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.objectives.kinds import Advantages
from experiments.evidence import optimum
from experiments.evidence.optimum import BETA, FURTHER, GRPO, NUM_GENERATIONS, PREFERENCE, Problem

PROBLEMS = {"one token": optimum.one_token(), "two tokens": optimum.two_tokens()}
OBJECTIVES = GRPO | FURTHER | PREFERENCE
REACHED = 1e-4


@functools.cache
def end(objective: str, problem: str) -> Tensor:
    return optimum.train(PROBLEMS[problem], OBJECTIVES[objective])


def distance(objective: str, problem: str, expected: Tensor) -> float:
    return optimum.total_variation(end(objective, problem), expected)


# ---- the problems --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_optimum_is_the_best_of_all_policies(name: str):
    """No other distribution has a higher E[r] - beta KL(pi || ref): tried around it and afar."""
    problem = PROBLEMS[name]
    reference = problem.logps(problem.ref_logits).exp()
    torch.testing.assert_close(reference.sum().item(), 1.0)

    def value(policy: Tensor) -> float:
        reward = (policy * problem.rewards).sum().item()
        return reward - BETA * optimum.kl_divergence(policy, reference)

    best = optimum.optimum(problem)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.01, 0.1, 1.0, 5.0):
        noise = torch.randn(200, len(best), generator=generator, dtype=torch.float64)
        others = (best.log() + spread * noise).softmax(-1)
        assert max(map(value, others)) < value(best)
    assert optimum.total_variation(reference, best) > 0.15


@pytest.mark.parametrize("name", PROBLEMS)
def test_expected_advantages_are_those_of_sampled_groups(name: str):
    problem = PROBLEMS[name]
    probabilities = problem.logps(problem.ref_logits).exp()
    generator = torch.Generator().manual_seed(1)
    num_groups = 40_000
    groups = torch.multinomial(
        probabilities, num_groups * NUM_GENERATIONS, replacement=True, generator=generator
    ).view(num_groups, NUM_GENERATIONS)
    sampled = Advantages.find("group")(problem.rewards[groups])
    expected = optimum.expected_advantages(problem.rewards, probabilities, "group")
    for completion in range(len(expected)):
        advantages = sampled[groups == completion]
        error = advantages.std().item() / len(advantages) ** 0.5
        assert abs(advantages.mean().item() - expected[completion].item()) < 5 * error


# ---- who reaches it ------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    "objective",
    [
        # At the optimum r - beta log(pi / ref) is the same for all completions, so that every
        # advantage is 0: neither baseline nor scale nor aggregation moves this end.
        "KL in the reward, leave-one-out",
        "KL in the reward, group mean",
        "KL in the reward, group mean and std",
        "KL in the reward, group mean and std of the batch",
        "KL in the reward, leave-one-out, mean per completion",
        # There the policy stands still, so that pi, old and sampler are one: no ratio, no drift.
        "`sapo`, KL in the reward",
        "`dppo`, KL in the reward",
        "`cispo`, KL in the reward",
        "`gspo`, KL in the reward",
        "drift to the sampler, KL in the reward",
        "DPO, pairs from the policy",
        "DPO, pairs from the reference",
        "`robust`, a tenth of the labels flipped",
    ],
)
def test_reaches_the_optimum(objective: str, problem: str):
    assert distance(objective, problem, optimum.optimum(PROBLEMS[problem])) < REACHED


@pytest.mark.parametrize("corrected", ["`token_truncate`", "`sequence_truncate`", "`dppo`"])
def test_weighed_by_policy_over_sampler_another_sampler_changes_nothing(corrected: str):
    """The sampler is hotter than the policy; without weights, its probabilities bend the end."""
    best = optimum.optimum(PROBLEMS["one token"])
    assert distance(f"the same, {corrected}", "one token", best) < REACHED
    plain = "sampler at temperature 1.25, `full` in the loss"
    assert distance(plain, "one token", best) > 0.02


KL_PER_TOKEN = [
    "`k2` in the loss, leave-one-out",
    "`full` in the loss, leave-one-out",
    "`k3` times the ratio, leave-one-out",
]


@pytest.mark.parametrize("objective", KL_PER_TOKEN)
def test_kl_in_the_loss_reaches_the_optimum_of_one_token(objective: str):
    assert distance(objective, "one token", optimum.optimum(PROBLEMS["one token"])) < REACHED


# ---- who ends elsewhere, at a point that is known ------------------------------------------------


def short_sighted_optimum(problem: Problem) -> Tensor:
    """Where a KL per token leads if a token is not charged for the KL of those that follow it.

    The second token is chosen as in the optimum, in proportion to ref exp(r / beta). The first one
    should be charged E[r] - beta KL of what follows; it is only credited with E[r].
    """
    ref = problem.ref_logits.softmax(-1)  # (3, 3)
    first = torch.zeros(3, dtype=torch.float64)
    probabilities = torch.zeros(7, dtype=torch.float64)
    for token, places in enumerate(([0], [1, 2, 3], [4, 5, 6])):
        rewards = problem.rewards[places]
        second = torch.ones(1, dtype=torch.float64)
        if token > 0:
            second = (ref[token].log() + rewards / BETA).softmax(-1)
        first[token] = ref[0, token].log() + (second * rewards).sum() / BETA
        probabilities[places] = second
    first = first.softmax(-1)
    return probabilities * first[[0, 1, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("objective", KL_PER_TOKEN)
def test_kl_in_the_loss_of_several_tokens_is_short_sighted(objective: str):
    """Its gradient at a token leaves out what the token does to the KL of later ones.

    Only a KL in the reward is passed back to all tokens (Tang and Munos 2025).
    """
    elsewhere = short_sighted_optimum(PROBLEMS["two tokens"])
    assert distance(objective, "two tokens", elsewhere) < REACHED
    assert optimum.total_variation(elsewhere, optimum.optimum(PROBLEMS["two tokens"])) > 0.01


def test_k3_in_the_loss_follows_the_reverse_kl():
    """Its expected gradient is that of KL(ref || pi): pi = ref / (1 - (r - E r) / beta).

    That is where pi (r - E r) = beta (pi - ref) holds; E r is found by bisection.
    """
    problem = PROBLEMS["one token"]
    reference = problem.logps(problem.ref_logits).exp()
    low, high = problem.rewards.max().item() - BETA, problem.rewards.max().item() + BETA
    for _ in range(100):
        mean = (low + high) / 2
        policy = reference / (1 - (problem.rewards - mean) / BETA)
        low, high = (mean, high) if policy.sum() > 1 else (low, mean)
    assert (policy * problem.rewards).sum().item() == pytest.approx(mean)
    assert distance("`k3` in the loss, leave-one-out", "one token", policy) < REACHED
    assert optimum.total_variation(policy, optimum.optimum(problem)) > 0.01


def test_k1_in_the_loss_ties_to_nothing():
    """Its expected gradient is 0: the policy gives everything to the best completion."""
    probabilities = end("`k1` in the loss, leave-one-out", "one token")
    best = PROBLEMS["one token"].rewards.argmax()
    assert probabilities[best] > 0.9


def test_a_group_mean_that_holds_the_completion_itself_strengthens_the_kl():
    """Advantages shrink by (G - 1) / G and the KL in the loss does not: beta G / (G - 1)."""
    problem = PROBLEMS["one token"]
    expected = optimum.optimum(problem, BETA * NUM_GENERATIONS / (NUM_GENERATIONS - 1))
    assert distance("`k2` in the loss, group mean", "one token", expected) < REACHED
    assert optimum.total_variation(expected, optimum.optimum(problem)) > 0.03


@pytest.mark.parametrize("name", PROBLEMS)
def test_ipo_has_the_share_of_wins_in_the_place_of_the_reward(name: str):
    """It ends at ref exp(P(y wins over a draw of the sampler) / beta) / Z (Azar et al. 2023)."""
    problem = PROBLEMS[name]
    ref = problem.logps(problem.ref_logits)
    wins = torch.sigmoid(problem.rewards[:, None] - problem.rewards[None, :]) @ ref.exp()  # (Y,)
    expected = (ref + wins / BETA).softmax(0)
    assert distance("`ipo`", name, expected) < REACHED
    assert optimum.total_variation(expected, optimum.optimum(problem)) > 0.1


@pytest.mark.parametrize("name", PROBLEMS)
def test_smoothing_ends_where_wrong_labels_would(name: str):
    """It is the expected loss under labels flipped at that rate: a looser fit, not a correction."""
    flipped = end("DPO, a tenth of the labels flipped", name)
    assert distance("DPO with label smoothing 0.1", name, flipped) < REACHED


def test_simpo_ends_at_the_optimum_of_a_uniform_reference():
    expected = (PROBLEMS["one token"].rewards / BETA).softmax(0)
    assert distance("`simpo`", "one token", expected) < REACHED


def test_sigmoid_norm_makes_the_log_ratio_grow_with_the_length():
    """Its fit is exact where beta / |y| log(pi / ref) = r + c: at ref exp(|y| (r + c) / beta).

    c makes the probabilities sum to 1, and is found by bisection.
    """
    problem = PROBLEMS["two tokens"]
    ref, lengths = problem.logps(problem.ref_logits), problem.mask.sum(1)
    low, high = -2.0, 2.0
    for _ in range(100):
        shift = (low + high) / 2
        policy = (ref + lengths * (problem.rewards + shift) / BETA).exp()
        low, high = (low, shift) if policy.sum() > 1 else (shift, high)
    assert distance("`sigmoid_norm`", "two tokens", policy) < REACHED
    assert distance("`sigmoid_norm`", "one token", optimum.optimum(PROBLEMS["one token"])) < REACHED
    assert optimum.total_variation(policy, optimum.optimum(problem)) > 0.2


def test_maxrl_weighs_a_prompt_by_how_rarely_it_succeeds():
    """Of rewards 0 and 1 with the chance p of a 1 it ends at ref exp(r w / beta) / Z.

    w = (1 - (1 - p)^(G - 1)) / p, which is 1 / p, the slope of log p, in large groups; p is found
    by bisection.
    """
    problem = PROBLEMS["one token"]._replace(
        rewards=torch.tensor([0.0, 0, 1, 0, 1, 0, 0, 0]).double()
    )
    low, high = 1e-3, 1.0
    for _ in range(100):
        p = (low + high) / 2
        weight = (1 - (1 - p) ** (NUM_GENERATIONS - 1)) / p
        policy = optimum.optimum(problem, BETA / weight)
        low, high = (p, high) if (policy * problem.rewards).sum() > p else (low, p)
    reached = optimum.train(problem, FURTHER["MaxRL, `full` in the loss"])
    assert optimum.total_variation(reached, policy) < REACHED
    assert optimum.total_variation(reached, optimum.optimum(problem)) > 0.02


# ---- the table of docs/objectives.md -------------------------------------------------------------

FAMILIES = {  # rows of many lines of `optimum`; the others have names of lines, with semicolons
    "KL in the reward, any baseline, scale and mean": [
        name for name in GRPO if name.startswith("KL in the reward")
    ],
    "`gspo`, `cispo`, `sapo`, `dppo` or drift to the sampler, KL in the reward": [
        f"{name}, KL in the reward"
        for name in ("`gspo`", "`cispo`", "`sapo`", "`dppo`", "drift to the sampler")
    ],
}
PAGE = (Path(__file__).parents[3] / "docs" / "objectives.md").read_text()
SECTION = PAGE.partition("## Which objectives end at the optimum")[2]
ROWS = re.findall(r"^\| (.+) \| (\d\.\d{4}) \| (\d\.\d{4}) \|$", SECTION, re.MULTILINE)
SHOWN = {name: ends for row, *ends in ROWS for name in FAMILIES.get(row, row.split("; "))}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_page_shows_where_each_objective_ends(objective: str):
    assert objective in SHOWN, f"the page's table has no row {objective}"
    ends = [distance(objective, name, optimum.optimum(PROBLEMS[name])) for name in PROBLEMS]
    assert [f"{end:.4f}" for end in ends] == SHOWN[objective]


def test_the_page_shows_no_other_objective_and_where_training_starts():
    assert SHOWN.keys() == OBJECTIVES.keys()
    for problem in PROBLEMS.values():
        reference = problem.logps(problem.ref_logits).exp()
        start = optimum.total_variation(reference, optimum.optimum(problem))
        assert f"{start:.3f}" in SECTION
