"""From the prompts of a step to the completions that GRPO trains on.

N prompts of this rank, K candidates of each, of which G are selected. A prompt's *row* is its index
of the rows read; the *slot* of selected completion g of prompt n is n * G + g, the index of all
tensors about selected completions. A group is *flat* if all rewards that its baseline is made of
are equal: its advantages are 0, before global normalisation and a KL in the reward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from common import data, distributed
from common.advantages import (
    StepRewards,
    apply_missing_eos_penalty,
    are_equal,
    eos_penalty,
    penalise_steps,
    rejection_sample,
)
from common.config.grpo import DISTINCT, GRPOConfig
from common.errors import UserError
from common.noise import derive_seed, hash_counters, permutation
from common.objectives.kinds import Advantages
from common.rewards.score import RewardFunctions, Rewards
from common.sampling.sampler import Rollouts
from common.text.example import Example

MAX_RESAMPLES = 4  # rounds of fresh prompts in a step


@dataclass(frozen=True)
class Groups:
    """The prompts of a step on this rank, with all candidates and their rewards."""

    examples: list[Example]  # N
    real: Tensor  # (N,) bool, False = filler, which counts nowhere
    rollouts: Rollouts  # N*K completions, prompt-major
    rewards: Tensor  # (N, K), with the penalty for not stopping
    by_function: dict[str, Tensor]  # (N, K) each, without it; nan where a function does not apply
    # N*K, empty if no function rewards steps
    steps: list[StepRewards] = field(default_factory=list)
    num_replaced: int = 0  # flat groups, over all ranks, for which fresh prompts were sampled

    @property
    def has_stop(self) -> Tensor:
        """(N, K) bool, False = ended by the length limit."""
        return self.rollouts.has_stop.view(self.rewards.shape)

    @property
    def rows(self) -> Tensor:
        """(N,) int64."""
        return data.row_numbers(self.examples)


@dataclass(frozen=True)
class SelectedCandidates:
    """The candidates that are trained on, G of each prompt."""

    groups: Groups
    indices: Tensor  # (N, G), which of the K
    candidates: Tensor  # (N*G,) by slot, which of the N*K
    rollouts: Rollouts  # the N*G completions, by slot
    lengths: Tensor  # (N, G) int64, tokens
    rewards: Tensor  # (N, G), those of `groups`
    advantage_rewards: Tensor  # as of `advantage_rewards`; with the baseline kept (F, N, G)
    flat: Tensor  # (N,) bool, True = a flat group; False for filler
    counted: Tensor  # (N, G) bool, True = in the loss and in its denominators


# ---- rewards -------------------------------------------------------------------------------------


@distributed.together()  # before the next collective: also a value that one rank refuses
def reward(
    scorer: RewardFunctions,
    examples: Sequence[Example],
    rollouts: Rollouts,
    config: GRPOConfig,
    step: int,  # number of finished steps of the run's `total_steps`
    total_steps: int,
) -> Rewards:
    """Rewards (N, K) of the completions, with the penalty for no stop token. Collective."""
    scored = scorer.score(examples, rollouts, step, total_steps)
    rewards, steps = scored.total, scored.steps
    eos = eos_penalty(config)  # in the place of a reward
    rewards = apply_missing_eos_penalty(rewards, rollouts.has_stop.view(rewards.shape), eos)
    if steps:
        refuse_with_steps(config)
        ends = (rollouts.lengths - 1).tolist()  # of the last tokens, N*K
        steps = penalise_steps(steps, ends, rollouts.has_stop.tolist(), eos)
    return replace(scored, total=rewards, steps=steps)


def advantage_rewards(
    total: Tensor,  # (N, K)
    by_function: Mapping[str, Tensor],
    has_stop: Tensor,  # (N, K)
    function: Advantages,
    config: GRPOConfig,
) -> Tensor:
    """Rewards (F, N, K) that advantages are made of: the total (F = 1), or each function's (GDPO).

    A reward of GDPO is the `missing_eos_penalty` without a stop token, and the mean of its group
    where the function does not apply.
    """
    if not function.takes_each_function:
        return total[None]
    rewards = torch.stack(list(by_function.values()))  # nan where one does not apply
    stopped = has_stop | rewards.isnan()
    rewards = apply_missing_eos_penalty(rewards, stopped, eos_penalty(config))
    means = rewards.nanmean(dim=2, keepdim=True).nan_to_num(0.0)  # 0: it applies to none
    return torch.where(rewards.isnan(), means, rewards)


def refuse_with_steps(config: GRPOConfig) -> None:
    """Raise a UserError for flags that mean nothing where functions reward steps."""
    plain = {"advantages": "group", "normalize_globally": False, "zero_variance": "keep"}
    if config.has_kl_in_reward:
        plain["kl_estimator"] = "k3"
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise UserError(
                f"--{name} is {getattr(config, name)}; it must be {value} where a reward function "
                "rewards steps, which are normalised as in DeepSeekMath, section 4.1.3."
            )


# ---- selection -----------------------------------------------------------------------------------


def select(
    groups: Groups, function: Advantages, config: GRPOConfig, step: int
) -> SelectedCandidates:
    """Keep G of the K candidates of each prompt by statistical rejection sampling.

    Flat groups are those of which the function makes no advantages.
    """
    num_prompts, num_candidates = groups.rewards.shape
    indices = torch.arange(num_candidates).expand(num_prompts, -1)  # all
    if num_candidates > config.num_generations:
        method = config.rejection_method.removesuffix(DISTINCT)
        is_set = method != config.rejection_method
        indices = rejection_sample(
            groups.rewards,
            num_keep=config.num_generations,
            temperature=config.rejection_temperature,
            method=method,
            # The noise is a function of the prompt, not of its slot in the batch.
            seed=hash_counters(derive_seed(config.seed, "selection", step), groups.rows),
            texts=groups.rollouts.numbered(num_prompts) if is_set else None,
        )
    return gather_candidates(groups, indices, function, config)


def gather_candidates(
    groups: Groups, indices: Tensor, function: Advantages, config: GRPOConfig
) -> SelectedCandidates:
    """Gather the candidates with the indices (N, G); mark flat groups, and what the loss counts."""
    num_prompts, num_candidates = groups.rewards.shape
    candidates = (torch.arange(num_prompts)[:, None] * num_candidates + indices).flatten()
    rollouts, rewards = groups.rollouts[candidates], groups.rewards.gather(1, indices)
    compared = advantage_rewards(
        groups.rewards, groups.by_function, groups.has_stop, function, config
    )
    magnitudes = compared.abs() if function.takes_each_function else sizes(groups, config)
    if config.baseline == "kept":
        of_kept = indices.expand(len(compared), -1, -1)
        compared, magnitudes = compared.gather(2, of_kept), magnitudes.gather(2, of_kept)
    # Roundings: of reward and weight, their product, the sum over functions, the penalty
    is_equal = are_equal(compared, magnitudes, len(groups.by_function) + 3)
    compared = torch.where(is_equal, compared[..., :1], compared)
    weights = torch.tensor(function.weights_of(config.reward_weights, len(compared)))
    weighted = compared * weights[:, None, None]  # a function of weight 0 teaches nothing
    flat = (weighted == weighted[..., :1]).all(2).all(0) & groups.real
    counted = groups.real[:, None].expand_as(indices)
    if config.zero_variance != "keep":
        counted = counted & ~flat[:, None]
    if config.mask_truncated_completions:
        counted = counted & groups.has_stop.gather(1, indices)
    lengths = rollouts.lengths.view(indices.shape)
    return SelectedCandidates(
        groups, indices, candidates, rollouts, lengths, rewards, compared, flat, counted
    )


def sizes(groups: Groups, config: GRPOConfig) -> Tensor:
    """Absolute values of a reward's terms, summed: (1, N, K)."""
    weights = config.reward_weights or [1.0] * len(groups.by_function)
    terms = [w * r for w, r in zip(weights, groups.by_function.values(), strict=True)]
    return torch.stack([groups.rewards, *terms]).nan_to_num(0.0).abs().sum(0, keepdim=True)


def replace_flat(
    groups: Groups,
    train_set: Sequence[Example],
    sample_groups: Callable[[list[Example], Tensor], Groups],  # of prompts, some of them filler
    function: Advantages,
    config: GRPOConfig,
    step: int,
) -> Groups:
    """Replace flat groups by those of fresh prompts (DAPO's dynamic sampling). Collective.

    The fresh rows come from a permutation of the step, without the rows of the batch: neither
    resuming a run nor the number of ranks changes which prompts are in the batch in the end.
    """
    rank, num_replaced = distributed.rank(), 0
    used = set(distributed.from_all_ranks(groups.rows[groups.real].tolist()))
    order = permutation(len(train_set), derive_seed(config.seed, "resampling"), step)
    fresh = (index for index in order if train_set[index].row not in used)  # read when asked for
    for _ in range(MAX_RESAMPLES):
        flat = select(groups, function, config, step).flat.nonzero().flatten().tolist()
        num_flat = distributed.from_all_ranks([len(flat)])  # of each rank
        taken = list(islice(fresh, sum(num_flat)))
        if not taken:
            break
        # The k-th flat group over the ranks gets the k-th fresh row. Ranks sample equally many,
        # since a reward model is called by all or by none.
        start = sum(num_flat[:rank])
        mine = taken[start : start + len(flat)]
        filler: list[int | None] = [None] * (max(num_flat) - len(mine))
        fresh_groups = sample_groups(*data.prompts(train_set, [*mine, *filler]))
        groups = replaced(groups, flat[: len(mine)], fresh_groups)
        num_replaced += len(taken)
    return replace(groups, num_replaced=num_replaced)


def replaced(groups: Groups, flat: Sequence[int], others: Groups) -> Groups:
    """The groups, of which the flat ones, by index, are replaced by the first of the others."""
    num_prompts = len(groups.examples)
    origin = torch.arange(num_prompts)  # (N,), in both one after the other
    origin[flat] = num_prompts + torch.arange(len(flat))

    def mixed(one: Tensor, other: Tensor) -> Tensor:
        by_prompt = torch.cat([one, other]).view(-1, one.numel() // num_prompts)
        return by_prompt[origin].view(one.shape)

    examples = [*groups.examples, *others.examples]
    return Groups(
        [examples[i] for i in origin.tolist()],
        groups.real,
        Rollouts(*map(mixed, groups.rollouts.tensors, others.rollouts.tensors)),
        mixed(groups.rewards, others.rewards),
        {name: mixed(one, others.by_function[name]) for name, one in groups.by_function.items()},
    )
