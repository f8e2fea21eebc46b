"""Which objectives end at the optimum they are meant for, and how far away the others end.

    python -m experiments.evidence.optimum        # prints Markdown, a minute on one core

RLHF maximises E[r(y)] - beta KL(pi || ref), whose optimum is known: ref(y) exp(r(y) / beta) / Z
(Rafailov et al. 2023, eq. 4). Here a policy has so few completions that every expectation is a sum:
over all completions, all groups of G of them, all pairs. Nothing is sampled, so the distance at the
end of training is the objective's own. Losses and advantages are those of `common`.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.advantages import EPSILON
from common.losses import aggregate, kl_estimate, masked_sum
from common.objectives.kinds import Advantages, PolicyObjective, PreferenceLoss

BETA = 0.5
NUM_GENERATIONS = 4
STEPS = 300
LEARNING_RATE = 0.1  # of Adam, falling to 0


class Problem(NamedTuple):
    """A policy with Y completions: a table of logits, a row per context, a column per token."""

    contexts: Tensor  # (Y, C) row of the table that each token of each completion is drawn from
    tokens: Tensor  # (Y, C) its column
    mask: Tensor  # (Y, C) bool, True = the completion has this token
    ref_logits: Tensor  # (S, V) the reference, from which the policy starts
    rewards: Tensor  # (Y,)

    def token_logps(self, logits: Tensor) -> Tensor:
        """Log-probs (Y, C) of every completion's tokens; 0 past its end."""
        return logits.log_softmax(-1)[self.contexts, self.tokens] * self.mask

    def logps(self, logits: Tensor) -> Tensor:
        """Log-probs (Y,) of the completions."""
        return masked_sum(self.token_logps(logits), self.mask, dim=1)


def one_token() -> Problem:
    """A bandit: eight completions of one token."""
    places = torch.arange(8)[:, None]
    return Problem(
        contexts=torch.zeros_like(places),
        tokens=places,
        mask=torch.ones_like(places, dtype=torch.bool),
        ref_logits=torch.tensor([[0.0, 0.7, -0.4, 0.3, -0.9, 0.1, 0.5, -0.2]]).double(),
        rewards=torch.tensor([0.1, 0.0, 0.9, 0.4, 1.0, 0.3, 0.6, 0.2]).double(),
    )


def two_tokens() -> Problem:
    """Seven completions: token 0 ends at once, tokens 1 and 2 are followed by one of three."""
    tokens = torch.tensor([[0, 0], *([first, second] for first in (1, 2) for second in range(3))])
    is_long = tokens[:, 0] > 0
    return Problem(
        contexts=torch.stack([torch.zeros(7).long(), tokens[:, 0]], dim=1),
        tokens=tokens,
        mask=torch.stack([torch.ones(7).bool(), is_long], dim=1),
        ref_logits=torch.tensor([[0.2, 0.6, -0.3], [0.4, -1.0, 0.1], [0.0, 0.3, -0.8]]).double(),
        rewards=torch.tensor([0.3, 0.0, 1.0, 0.2, 0.6, 0.1, 0.9]).double(),
    )


def optimum(problem: Problem, beta: float = BETA) -> Tensor:
    """Probabilities (Y,) of ref(y) exp(r(y) / beta) / Z."""
    return (problem.logps(problem.ref_logits) + problem.rewards / beta).softmax(0)


# ---- objectives: losses whose gradient is the expected gradient of training ----------------------


@cache
def objective_of(kind: Any, texts: str) -> Any:
    """An objective as its flag has it; to read its files takes longer than a step."""
    return kind.find(*texts.split())


@cache
def groups_of(num_completions: int) -> tuple[Tensor, Tensor]:
    """Each completion (M, G) with all sets of others, and in how many orders (M,) they are drawn.

    The first of a group gets the same advantage whatever the order of the others.
    """
    numbers = torch.arange(num_completions)
    others = torch.combinations(numbers, NUM_GENERATIONS - 1, with_replacement=True)
    times = nn.functional.one_hot(others, num_completions).sum(dim=1).double()  # of each
    orders = math.factorial(NUM_GENERATIONS - 1) / torch.lgamma(times + 1).exp().prod(dim=1)
    first = numbers.repeat_interleave(len(others))[:, None]
    groups = torch.cat([first, others.repeat(num_completions, 1)], dim=1)
    return groups, orders.round().repeat(num_completions)


def grpo(
    problem: Problem,
    logits: Tensor,
    *,
    advantages: str = "rloo",
    kl: str = "k2",
    aggregation: str = "constant",
    objective: str = "clip",
    sampler_temperature: float = 1.0,
) -> Tensor:
    """GRPO over all groups of completions drawn from the sampler, one update per rollout.

    Args:
        problem: What is optimised.
        logits: (S, V) of the policy.
        advantages: A file of `common/objectives/advantages`, with settings.
        kl: How the policy is tied to the reference. `k1`, `k2`, `k3`: the estimator times beta is
            added to the loss of a token. `full`: the exact KL of the token's distribution.
            `k3 x ratio`: k3 times pi / sg(pi), whose value is k3. `reward`: beta times the sum of
            k1 over a completion leaves its reward.
        aggregation: See `aggregate`; `constant` here is the sum over a completion's tokens.
        objective: Files of `common/objectives/policy`, with settings.
        sampler_temperature: The sampler is the policy at this temperature: another one but for 1.
    """
    token_logps, ref = problem.token_logps(logits), problem.token_logps(problem.ref_logits)
    sampled = problem.token_logps(logits.detach() / sampler_temperature)
    probabilities = masked_sum(sampled, problem.mask, dim=1).exp()  # (Y,)
    rewards, mask = problem.rewards, problem.mask
    if kl == "reward":
        rewards = rewards - BETA * kl_estimate(sampled, ref, estimator="k1").sum(dim=1)
    expected = expected_advantages(rewards, probabilities, advantages)  # (Y,)
    loss = objective_of(PolicyObjective, objective)
    per_token, _ = loss(token_logps, token_logps, sampled, expected, mask)
    if kl != "reward":
        per_token = per_token + BETA * kl_in_loss(problem, logits, kl)
    # A completion counts as often as it is drawn. One sequence of length 1: a sum, no mean.
    weighted = probabilities[:, None] * per_token
    return aggregate(weighted, mask, aggregation=aggregation, num_sequences=1, max_length=1)


def kl_in_loss(problem: Problem, logits: Tensor, kl: str) -> Tensor:
    """The KL to the reference (Y, C) at every token, by the names that `grpo` lists."""
    token_logps, ref = problem.token_logps(logits), problem.token_logps(problem.ref_logits)
    if kl == "full":
        logps, ref_logps = logits.log_softmax(-1), problem.ref_logits.log_softmax(-1)
        exact = (logps.exp() * (logps - ref_logps)).sum(-1)  # (S,)
        return exact[problem.contexts]
    if kl == "k3 x ratio":
        ratio = (token_logps - token_logps.detach()).exp()
        return ratio * kl_estimate(token_logps, ref, estimator="k3")
    return kl_estimate(token_logps, ref, estimator=kl)


def expected_advantages(rewards: Tensor, probabilities: Tensor, name: str) -> Tensor:
    """Mean advantage (Y,) of each completion over all groups of `NUM_GENERATIONS` that hold it.

    The name is that of a file of `common/objectives/advantages`. GDPO's two rewards are 0.5 where
    the reward is above 0.5, and the remainder.
    """
    function: Advantages = objective_of(Advantages, name)
    groups, orders = groups_of(len(rewards))  # (M, G), (M,)
    is_high = 0.5 * (rewards > 0.5)
    is_split = function.takes_each_function
    by_function = torch.stack([is_high, rewards - is_high] if is_split else [rewards])  # (F, Y)
    moments = [(probabilities * rewards**power).sum() for power in (1, 2, 0)]  # of a draw
    in_groups, weights = by_function[:, groups], [1.0] * len(by_function)
    advantages = function(in_groups, weights, None, lambda _: 1e9 * torch.stack(moments))[:, 0]
    others = orders * probabilities[groups[:, 1:]].prod(dim=1)  # chance of them, given the first
    if function.normalizes_globally:  # the mean over the batch is 0, as it is in every group
        squares = advantages.double() ** 2 * others * probabilities[groups[:, 0]]
        others = others / (squares.sum().sqrt() + EPSILON)
    return (advantages.double() * others).view(len(rewards), -1).sum(dim=1)


def preference(
    problem: Problem,
    logits: Tensor,
    *,
    loss_type: str = "sigmoid",
    on_policy: bool = True,
    flipped: float = 0.0,
) -> Tensor:
    """A loss of the DPO family over all pairs, labelled by Bradley-Terry on the reward.

    Args:
        problem: What is optimised.
        logits: (S, V) of the policy.
        loss_type: Files of `common/objectives/preference`, with settings, whose losses add up.
        on_policy: Pairs are drawn from the policy; else from the reference.
        flipped: Share of the labels that are wrong.
    """
    logps, ref = problem.logps(logits), problem.logps(problem.ref_logits)
    sampler = (logps if on_policy else ref).detach().exp()  # (Y,)
    pairs = torch.cartesian_prod(*[torch.arange(len(logps))] * 2)  # (Y^2, 2)
    first, second = pairs.T
    wins = torch.sigmoid(problem.rewards[first] - problem.rewards[second])
    wins = (1 - flipped) * wins + flipped * (1 - wins)
    preference_loss: PreferenceLoss = objective_of(PreferenceLoss, loss_type)
    loss = preference_loss(logps[pairs], ref[pairs], problem.mask.sum(dim=1)[pairs], BETA)  # (Y^2,)
    # Every pair stands here in both orders: once with each of its labels.
    return (sampler[first] * sampler[second] * wins * loss).sum()


# ---- where they end ------------------------------------------------------------------------------

Objective = Callable[[Problem, Tensor], Tensor]

GRPO: dict[str, Objective] = {
    "KL in the reward, leave-one-out": partial(grpo, kl="reward"),
    "KL in the reward, group mean": partial(grpo, kl="reward", advantages="none"),
    "KL in the reward, group mean and std": partial(grpo, kl="reward", advantages="group"),
    "KL in the reward, group mean and std of the batch": partial(
        grpo, kl="reward", advantages="batch"
    ),
    "KL in the reward, leave-one-out, mean per completion": partial(
        grpo, kl="reward", aggregation="grpo"
    ),
    "`k2` in the loss, leave-one-out": partial(grpo, kl="k2"),
    "`full` in the loss, leave-one-out": partial(grpo, kl="full"),
    "`k3` times the ratio, leave-one-out": partial(grpo, kl="k3 x ratio"),
    "`k3` in the loss, leave-one-out": partial(grpo, kl="k3"),
    "`k1` in the loss, leave-one-out": partial(grpo, kl="k1"),
    "`k2` in the loss, group mean": partial(grpo, kl="k2", advantages="none"),
    "`k2` in the loss, group mean and std": partial(grpo, kl="k2", advantages="group"),
    "GRPO as published: `k3`, group mean and std, mean per completion": partial(
        grpo, kl="k3", advantages="group", aggregation="grpo"
    ),
}
DRIFT: dict[str, Any] = {"objective": "clip sampler_drift:coef=0.5"}
HOT: dict[str, Any] = {"kl": "full", "sampler_temperature": 1.25}
FURTHER: dict[str, Objective] = {
    "`sapo`, KL in the reward": partial(grpo, kl="reward", objective="sapo"),
    "`dppo`, KL in the reward": partial(grpo, kl="reward", objective="dppo"),
    "`cispo`, KL in the reward": partial(grpo, kl="reward", objective="cispo"),
    "`gspo`, KL in the reward": partial(grpo, kl="reward", objective="gspo"),
    "drift to the sampler, KL in the reward": partial(grpo, kl="reward", **DRIFT),
    "MaxRL, `full` in the loss": partial(grpo, kl="full", advantages="mean"),
    "GDPO, `full` in the loss": partial(grpo, kl="full", advantages="gdpo"),
    "sampler at temperature 1.25, `full` in the loss": partial(grpo, **HOT),
    "the same, `token_truncate`": partial(grpo, **HOT, objective="clip sampler_weights"),
    "the same, `sequence_truncate`": partial(
        grpo, **HOT, objective="clip sampler_weights:correction=sequence_truncate"
    ),
    "the same, `geometric_mask`": partial(grpo, **HOT, objective="clip geometric_mask"),
    "the same, `dppo`": partial(grpo, **HOT, objective="dppo"),
    "the same, off-policy mask of 0.1": partial(grpo, **HOT, objective="clip off_policy_mask"),
    "the same, drift of 0.5": partial(grpo, **HOT, **DRIFT),
}
PREFERENCE: dict[str, Objective] = {
    "DPO, pairs from the policy": preference,
    "DPO, pairs from the reference": partial(preference, on_policy=False),
    "DPO, a tenth of the labels flipped": partial(preference, flipped=0.1),
    "`sigmoid_norm`": partial(preference, loss_type="sigmoid_norm"),
    "`robust`, a tenth of the labels flipped": partial(
        preference, flipped=0.1, loss_type="robust:label_smoothing=0.1"
    ),
    "DPO with label smoothing 0.1": partial(preference, loss_type="sigmoid:label_smoothing=0.1"),
    "`ipo`": partial(preference, on_policy=False, loss_type="ipo"),
    "`ipo_mean`": partial(preference, on_policy=False, loss_type="ipo_mean"),
    "`hinge`": partial(preference, loss_type="hinge"),
    "`simpo`": partial(preference, loss_type="simpo"),
    "DPO and SFT term": partial(preference, on_policy=False, loss_type="sigmoid sft"),
}


def train(problem: Problem, objective: Objective) -> Tensor:
    """Probabilities (Y,) of the policy after training from the reference."""
    logits = problem.ref_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        objective(problem, logits).backward()
        optimizer.step()
        schedule.step()
    return problem.logps(logits.detach()).exp()


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the sum of absolute differences: 0 = the same distribution, 1 = none in common."""
    return (first - second).abs().sum().item() / 2


def kl_divergence(first: Tensor, second: Tensor) -> float:
    """KL(first || second) in nats; 0 log 0 = 0."""
    return float(torch.special.xlogy(first, first / second).sum())


def distances(problem: Problem, reached: Tensor) -> list[float]:
    """Total variation and KL of probabilities (Y,) from the optimum."""
    best = optimum(problem)
    return [total_variation(reached, best), kl_divergence(reached, best)]


def main() -> None:
    """Print how far the reference is from the optimum, then a table of each family."""
    problems = (one_token(), two_tokens())
    start = [x for p in problems for x in distances(p, p.logps(p.ref_logits).exp())]
    print(f"beta {BETA}, groups of {NUM_GENERATIONS}, {STEPS} steps of Adam.")
    print("The reference is this far from the optimum:", *(f"{x:.4f}" for x in start))
    for objectives in (GRPO, FURTHER, PREFERENCE):
        print("\n| objective | one token: TV | KL, nats | two tokens: TV | KL, nats |")
        print("|---|---|---|---|---|")
        for name, objective in objectives.items():
            ends = [x for p in problems for x in distances(p, train(p, objective))]
            print(f"| {name} | {' | '.join(f'{x:.4f}' for x in ends)} |", flush=True)


if __name__ == "__main__":
    main()
