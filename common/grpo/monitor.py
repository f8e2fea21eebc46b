"""What is told of GRPO's steps: warnings, metrics, tables of samples."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common import distributed
from common.advantages import (
    effective_sample_size,
    eos_penalty,
    group_advantages,
    num_candidates_seen,
)
from common.data import Example
from common.errors import EngineError
from common.grpo.config import GRPOConfig
from common.grpo.rollouts import Kept, of_rejection, reward
from common.record.metrics import Accumulator
from common.sampling.sampler import Sampler
from common.scoring import Policy

if TYPE_CHECKING:
    from common.model.lora import AdapterReference
    from common.record.logger import RunLogger
    from common.rewards.score import RewardFunctions

MOST_FLAT = 0.9  # share of flat groups that is worth a word


def show_samples(
    logger: "RunLogger",
    sampler: Sampler,
    scorer: "RewardFunctions",
    reference: "Policy | AdapterReference | None",
    examples: Sequence[Example],
    config: GRPOConfig,
    step: int,
) -> None:
    """Record completions of fixed prompts with fixed noise, and print some of them. Collective.

    Every rank samples the same prompts, so that reward models are called equally often. With a
    reference each row also has its `ref_token_logps`, at the temperature of sampling.
    """
    from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX
    from common.sampling import token_records

    if not examples:
        return
    try:
        rollouts = sampler.sample(
            examples,
            num_samples=config.num_generations,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
        )
    except EngineError as error:  # which ends the run when it samples to train, and is saved there
        distributed.print_rank0(f"warning: there is no table of samples: {error}")
        return
    scored = reward(scorer, examples, rollouts, config, step, logger.total_steps)
    scale, baseline = config.scale_rewards, config.advantage_baseline
    advantages = group_advantages(scored.total, scale=scale, baseline=baseline)  # (N, G)
    by_function = {name: own.flatten().tolist() for name, own in scored.by_function.items()}
    columns: dict[str, list[Any]] = {
        "reward": scored.total.flatten().tolist(),
        **{
            f"{FUNCTION_PREFIX}{name}": [None if math.isnan(r) else r for r in rewards]
            for name, rewards in by_function.items()
        },
        "advantage": advantages.flatten().tolist(),
        **{f"{LOGGED_PREFIX}{name}": values for name, values in scored.log.columns.items()},
    }
    if reference is not None:
        sampled = rollouts.completed(examples)
        columns["ref_token_logps"] = token_records.token_logps(
            reference, sampled, config, sampler.vocabulary, config.temperature
        )
    table = sampler.table(examples, rollouts, **columns)
    logger.samples(step, table, few_of_each(table, config.num_generations))


def few_of_each(table: Sequence[dict[str, Any]], per_prompt: int) -> list[dict[str, Any]]:
    """Of each prompt's rows those with the highest, the middle and the lowest reward, in order."""
    found = []
    for start in range(0, len(table), per_prompt):
        own = sorted(table[start : start + per_prompt], key=lambda row: -row["reward"])
        found += [own[place] for place in sorted({0, (len(own) - 1) // 2, len(own) - 1})]
    return found


def add_metrics(
    metrics: Accumulator, kept: Kept, advantages: Tensor, config: GRPOConfig, step: int
) -> None:
    """Record what was sampled, as means over the completions or groups of real prompts."""
    from common.record.glossary import FUNCTION_PREFIX

    groups, rewards = kept.groups, kept.groups.rewards
    weights = ((rewards - rewards.amax(1, keepdim=True)) / config.rejection_temperature).exp()
    values = {
        "reward_std": rewards.std(1),
        "zero_variance_fraction": kept.flat,
        "effective_sample_size": effective_sample_size(weights),
        "reward": rewards,
        "completion_length": groups.rollouts.lengths.view(rewards.shape),
        "stop_rate": groups.has_stop,
        # Of tokens: their mean.
        "advantage_mean_kept": advantages.sum(-1) / kept.lengths if groups.steps else advantages,
        **{f"{FUNCTION_PREFIX}{name}": own for name, own in groups.by_function.items()},
    }
    if config.num_candidates > config.num_generations:
        values["kept_reward"] = kept.rewards
        values["candidates_seen"] = of_rejection(num_candidates_seen, groups, config, step)
    for name, own in values.items():  # (N,), (N, K) or (N, G)
        in_batch = own[groups.real].double()
        in_batch = in_batch[~in_batch.isnan()]  # a function that does not apply to a row says nan
        metrics.add(name, in_batch.sum(), in_batch.numel())


def effective_share(weights: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Effective sample size of a step's sampler weights over the number of tokens. Collective.

    Kish's (sum w)^2 / (n sum w^2) over the tokens of all ranks, from the weights (B, C) and the
    mask of each micro-batch: 1 where all weights are equal. With it, how often it counts in a mean:
    0 where there is no token, else 1.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=distributed.device())
    for values, mask in weights:
        own = (values * mask).double()
        sums += torch.stack([own.sum(), own.square().sum(), mask.sum()])
    total, squares, number = distributed.all_reduce_sum(sums).unbind()
    share = total**2 / (number * squares).clamp(min=torch.finfo(torch.float64).tiny)
    return share, number > 0


def warn(kept: Kept, config: GRPOConfig, step: int, said: set[str]) -> None:
    """Say once on rank 0 why a step teaches nothing or the wrong thing. Collective.

    What was `said` before is not said again.
    """
    penalty, groups = eos_penalty(config), kept.groups
    has_stop, real = groups.has_stop, groups.real[:, None]
    is_paid = torch.zeros_like(has_stop)
    if penalty is not None:
        below = has_stop & (groups.rewards < penalty)
        is_paid = ~has_stop & below.any(1, keepdim=True) & real
    counted = [which.sum() for which in (real, kept.flat, has_stop & real, is_paid)]
    counts = distributed.all_reduce_sum(torch.stack(counted)).tolist()
    num_groups, num_flat, num_stopped, num_paid = counts
    causes = {}
    if num_stopped == 0 and penalty is not None:
        causes["no completion stopped"] = (
            f"within --max_completion_length {config.max_completion_length}, so every reward is "
            f"--missing_eos_penalty {penalty:g} and none tells completions apart: start from a "
            "model that was trained to stop, or raise that length, or use --penalize_missing_eos "
            "false."
        )
    elif num_flat >= MOST_FLAT * num_groups:
        causes["nearly all groups are flat:"] = (
            f"in {num_flat} of {num_groups} all rewards are equal and do not tell a prompt's "
            "completions apart."
        )
    if num_paid:
        causes["not stopping pays:"] = (
            f"--missing_eos_penalty {penalty:g} is above the reward of one that stopped, in the "
            f"groups of {num_paid} that did not; lower it below every reward."
        )
    for cause in [cause for cause in causes if cause not in said]:
        said.add(cause)
        distributed.print_rank0(f"warning: step {step + 1}: {cause} {causes[cause]}")
