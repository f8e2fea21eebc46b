"""From rewards to advantages, and which candidates of a prompt to keep.

Rewards are (N, G): N prompts with G completions each. Work is done in float64, results are float32.
A group of equal rewards has advantage exactly 0; what float32 rounding may make is no difference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.losses import check_choice
from common.noise import derive_seed, hash_counters, uniform

REJECTION_METHODS = ("rso", "gumbel", "max_variance")
EPSILON = 1e-4  # added to every standard deviation, which is the unbiased one, both as in TRL
UNIT = 2.0**-24  # largest relative error of a number that is rounded to float32

# Rewards of a completion's steps by the index of the step's last token
StepRewards = dict[int, float]


def normalise_globally(
    advantages: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Advantages of any shape, shifted and scaled to mean 0 and standard deviation 1, float32.

    Over all samples of all ranks where the mask is True; elsewhere 0. A collective, by an
    `all_reduce` that sums a tensor over the ranks.
    """
    values = advantages.double()
    mean, std = global_moments(values[mask], all_reduce)
    is_zero = mean.abs() <= 4 * UNIT * std  # of rounded advantages: equal rewards stay at 0
    flat = (values == 0).all(dim=-1, keepdim=True) & is_zero
    return torch.where(mask & ~flat, (values - mean) / (std + EPSILON), 0.0).float()


def step_advantages(
    step_rewards: Sequence[Sequence[float]] | Tensor,  # of B completions: lists, or padded (B, S)
    step_ends: Sequence[Sequence[int]] | Tensor,  # alike, index of the last token; -1: padding
    completion_mask: Tensor,  # (B, C) bool
    *,
    num_generations: int,  # completions of a prompt, neighbouring rows
) -> Tensor:
    """Advantages of tokens from rewards of steps (process supervision, DeepSeekMath section 4.1.3).

    All step rewards of a prompt's completions are normalised together; a token's advantage, (B, C)
    float32, is the sum of the normalised rewards of the steps that end at it or after it. It is 0
    where the mask is False; the rewards of a completion without any token are normalised too.
    """
    num_rows, num_columns = completion_mask.shape
    assert len(step_rewards) == num_rows, "one list of steps per completion"
    assert num_rows % num_generations == 0, "prompts come with all their completions"
    at_end = torch.zeros((num_rows, num_columns), dtype=torch.float64)
    by_row = list(zip(step_ends, step_rewards, strict=True))
    for first in range(0, num_rows, num_generations):
        steps = [  # of one prompt: (row, column of the last token, reward)
            (row, int(end), float(reward))
            for row, (ends, rewards) in enumerate(by_row[first : first + num_generations], first)
            for end, reward in zip(ends, rewards, strict=True)
            if end != -1
        ]
        for row, end, _ in steps:
            if not 0 <= end < num_columns:
                between = f"between 0 and {num_columns - 1}, or be -1 for padding"
                raise ValueError(f"a step of completion {row} ends at {end} but must lie {between}")
        if len(steps) < 2:
            continue  # nothing to compare with: advantage 0, as for equal rewards
        rewards = torch.tensor([[reward for _, _, reward in steps]], dtype=torch.float64)
        deviations = deviations_from_mean(rewards)[0]
        normalised = deviations / (deviations.std() + EPSILON)
        rows = torch.tensor([row for row, _, _ in steps])
        columns = torch.tensor([end for _, end, _ in steps])
        at_end.index_put_((rows, columns), normalised, accumulate=True)
    from_here_on = at_end.flip(1).cumsum(dim=1).flip(1).to(completion_mask.device)  # (B, C)
    return torch.where(completion_mask, from_here_on, 0.0).float()


def rejection_sample(
    rewards: Tensor,
    *,
    num_keep: int,
    temperature: float,
    method: str,
    seed: int | Tensor,
    texts: Tensor | None = None,
) -> Tensor:
    """Choose which of each prompt's candidates to keep, each at most once: (N, num_keep) indices.

    - `rso`: statistical rejection sampling (Liu et al. 2023, algorithm 1): pass over the candidates
      left, accept each with probability exp((r - max r of those left) / temperature), stop when
      there are enough, else pass again. It prefers early candidates, since it stops in mid-pass.
    - `gumbel`: exact draws without replacement from softmax(r / temperature), which considers every
      candidate: the largest r / temperature + Gumbel noise (Kool et al. 2019, section 2).
    - `max_variance`: the subset whose rewards have the largest variance, which lies in both tails
      (Xu et al. 2025, "Not all rollouts are useful"). No noise, no temperature.

    Those of `rso` and `gumbel` come in the order in which they were drawn, those of `max_variance`
    from the highest reward to the lowest.

    The rewards (N, K) are raw, not normalised: the temperature, above 0, is in their unit. The seed
    is an integer, or one per prompt (N,), so that the choice does not depend on which rank or batch
    holds the prompt. `texts` (N, K), equal where candidates of a prompt have the same text, make
    the candidates of `rso` and `gumbel` a set, as RSO's are: a text is not drawn again before all
    others are. Without them it counts as often as it was sampled.

    >>> options = {"num_keep": 2, "temperature": 0.5, "seed": 0}
    >>> rejection_sample(torch.tensor([[0.1, 0.9, 0.2, 0.0]]), method="max_variance", **options)
    tensor([[1, 3]])
    """
    check_choice("method", method, REJECTION_METHODS)
    if not 0 < num_keep <= rewards.shape[1]:
        raise ValueError(f"num_keep is {num_keep} but must lie between 1 and {rewards.shape[1]}")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature} but must be above 0")
    rewards = rewards.double()
    assert rewards.isfinite().all(), "a candidate without a finite reward cannot be ranked"
    if method == "max_variance":
        return _keep_max_variance(rewards, num_keep)
    if not isinstance(seed, Tensor):
        seed = hash_counters(seed, torch.arange(len(rewards), device=rewards.device))
    seeds = seed.to(rewards.device)[:, None]  # (N, 1)
    keep = _keep_rso if method == "rso" else _keep_gumbel
    return keep(rewards / temperature, num_keep, seeds, first_of_text(rewards, texts))


def effective_sample_size(weights: Tensor) -> Tensor:
    """Kish's effective sample size (sum w)^2 / sum w^2 over the last dimension, float32."""
    weights = weights.double()
    return (weights.sum(dim=-1) ** 2 / (weights**2).sum(dim=-1)).float()


def first_of_text(rewards: Tensor, texts: Tensor | None) -> Tensor:
    """Whether no candidate (N, K) before has the same text; True everywhere without texts."""
    if texts is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    is_same = texts[:, :, None] == texts[:, None, :]  # (N, K, K)
    return ~is_same.tril(-1).any(dim=2).to(rewards.device)


def _keep_rso(scores: Tensor, num_keep: int, seeds: Tensor, first: Tensor) -> Tensor:
    """RSO's algorithm 1 on scores (N, K), those not the `first` of their text (N, K) at the end."""
    salt = derive_seed(0, "rejection_sample", "rso")
    candidates = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)  # (N, K)
    passes = torch.full_like(scores, torch.inf)  # (N, K), the one in which it was accepted
    # Every pass accepts at least the best candidate left, so num_keep passes are enough.
    for number in range(num_keep):
        remaining = passes.isinf()
        left = remaining & first
        left = torch.where(left.any(dim=1, keepdim=True), left, remaining)
        scores_left = scores.masked_fill(~left, -torch.inf)
        probabilities = (scores_left - scores_left.max(dim=1, keepdim=True).values).exp()
        accepted = uniform(salt, seeds, number, candidates) < probabilities  # of a whole pass
        passes = passes.masked_fill(accepted, number)
    return passes.argsort(dim=1, stable=True)[:, :num_keep]


def _keep_gumbel(scores: Tensor, num_keep: int, seeds: Tensor, first: Tensor) -> Tensor:
    """Top num_keep of the scores (N, K) plus standard Gumbel noise -log(-log u), `first` before."""
    salt = derive_seed(0, "rejection_sample", "gumbel")
    noise = uniform(salt, seeds, torch.arange(scores.shape[1], device=scores.device))  # (N, K)
    ranks = (scores - torch.log(-torch.log(noise))).argsort(dim=1).argsort(dim=1)  # (N, K)
    return (ranks + first * scores.shape[1]).topk(num_keep, dim=1).indices


def _keep_max_variance(rewards: Tensor, num_keep: int) -> Tensor:
    """The subset of largest variance: i candidates from the top and the others from the bottom.

    Some i of at least 1 attains it, since moving a member away from the mean adds variance.
    """
    ordered, candidates = deviations_from_mean(rewards).sort(
        dim=1, descending=True, stable=True
    )  # (N, K)
    ranks = torch.arange(num_keep, device=rewards.device)
    from_below = rewards.shape[1] - num_keep + ranks
    options = torch.where(ranks <= ranks[:, None], ranks, from_below)  # row i - 1: i from the top
    variances = ordered[:, options].var(dim=2, correction=0)  # (N, num_keep)
    best = options[variances.argmax(dim=1)]  # (N, num_keep) ranks
    return candidates.gather(1, best)


def are_equal(values: Tensor, magnitudes: Tensor, num_terms: int) -> Tensor:
    """Whether the values (..., G) of a group are equal but for rounding, (..., 1).

    Each is a float32 sum of terms whose absolute values add up to `magnitudes` (..., G). With n
    roundings on a term's way it is off by at most n units of them (Higham 2002, section 4.2).
    """
    errors = num_terms * UNIT * magnitudes.double()
    gaps = (values.double() - values.double()[..., :1]).abs()
    return (gaps <= errors + errors[..., :1]).all(dim=-1, keepdim=True)


def deviations_from_mean(rewards: Tensor) -> Tensor:
    """Rewards (N, G) minus the mean of their row, in float64; exactly 0 in a row of equal ones."""
    relative = rewards.double() - rewards.double()[:, :1]
    relative = torch.where(are_equal(rewards, rewards.abs(), 2), 0.0, relative)
    return relative - relative.mean(dim=1, keepdim=True)


def global_moments(
    values: Tensor, all_reduce: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of float64 values over all ranks, as scalars."""
    count = torch.tensor(values.numel(), dtype=torch.float64, device=values.device)
    sums = torch.stack([values.sum(), (values**2).sum(), count])
    total, total_squares, count = sums if all_reduce is None else all_reduce(sums)
    mean = total / count.clamp(min=1)
    squares = (total_squares - count * mean**2).clamp(min=0)  # rounding may leave it below 0
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def eos_penalty(config: Any) -> float | None:
    """The penalty that a config with `missing_eos_penalty` asks for, None for none."""
    return config.missing_eos_penalty if config.penalize_missing_eos else None


def apply_missing_eos_penalty(rewards: Tensor, has_stop: Tensor, penalty: float | None) -> Tensor:
    """Rewards with the penalty, if there is one, in the place of those without a stop token.

    The "EOS trick" (Huang et al. 2024). They are replaced, not lowered: a reward model was never
    trained on texts that break off. `has_stop` is bool and has the shape of the rewards.
    """
    assert rewards.shape == has_stop.shape
    return rewards if penalty is None else torch.where(has_stop, rewards, penalty)


def penalise_steps(
    steps: Sequence[StepRewards],
    ends: Sequence[int],
    has_stop: Sequence[bool],
    penalty: float | None,
) -> list[StepRewards]:
    """Apply the same penalty to step rewards: of a completion without stop it is the only step.

    The B completions end at the tokens `ends`.
    """
    rows = zip(steps, ends, has_stop, strict=True)
    return [rewards if stop or penalty is None else {end: penalty} for rewards, end, stop in rows]
