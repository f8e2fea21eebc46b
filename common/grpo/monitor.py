"""Metrics, warnings and tables of samples of GRPO's steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from common import distributed
from common.advantages import effective_sample_size, eos_penalty
from common.config.grpo import GRPOConfig
from common.grpo.rollouts import SelectedCandidates, advantage_rewards, reward
from common.losses import masked_sum
from common.objectives.kinds import Advantages
from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX, OBJECTIVE_PREFIX
from common.record.logger import RunLogger
from common.record.metrics import Accumulator
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Sampler
from common.text.example import Example

PLAIN_METRICS = ("clip_fraction", "off_policy_fraction")  # of objectives, without a prefix
MOST_FLAT = 0.9  # share of flat groups from which there is a warning


def show_samples(
    logger: RunLogger,
    sampler: Sampler,
    scorer: RewardFunctions,
    examples: Sequence[Example],
    function: Advantages,
    config: GRPOConfig,
    step: int,
) -> None:
    """Record completions of fixed prompts with fixed noise, and print some of them. Collective.

    Every rank samples the same prompts, so that reward models are called equally often.
    """
    if not examples:
        return
    rollouts = sampler.sample(examples, num_samples=config.num_generations, **config.sampling)
    scored = reward(scorer, examples, rollouts, config, step, logger.total_steps)
    has_stop = rollouts.has_stop.view(scored.total.shape)
    compared = advantage_rewards(
        scored.total, scored.by_function, has_stop, function, config
    )  # (F, N, G)
    weights = function.weights_of(config.reward_weights, len(compared))
    advantages = function(compared, weights)  # (N, G), of these prompts alone
    by_function = {f"{FUNCTION_PREFIX}{name}": r for name, r in scored.by_function.items()}
    rewards = {"reward": scored.total, **by_function, "advantage": advantages}
    columns: dict[str, list[Any]] = {
        name: [None if math.isnan(value) else value for value in values.flatten().tolist()]
        for name, values in rewards.items()
    }
    columns |= {f"{LOGGED_PREFIX}{name}": each for name, each in scored.log.columns.items()}
    table = sampler.table(examples, rollouts, **columns)
    logger.samples(step, table, few_of_each(table, config.num_generations))


def few_of_each(table: Sequence[dict[str, Any]], per_prompt: int) -> list[dict[str, Any]]:
    """The rows of each prompt with the highest, the middle and the lowest reward, in order."""
    few = []
    for start in range(0, len(table), per_prompt):
        rows = sorted(table[start : start + per_prompt], key=lambda row: -row["reward"])
        few += [rows[i] for i in sorted({0, (len(rows) - 1) // 2, len(rows) - 1})]
    return few


class StepMonitor:
    """Metrics and warnings of the steps of a run."""

    def __init__(self, metrics: Accumulator, config: GRPOConfig) -> None:
        """Nothing is recorded yet, and there was no warning."""
        self.metrics, self.config = metrics, config
        self.warned: set[str] = set()  # causes

    def record(self, selected: SelectedCandidates, advantages: Tensor, step: int) -> None:
        """Record what was sampled and selected; warn where that teaches nothing. Collective.

        Metrics are means over the completions, or over the groups, of real prompts.
        """
        self.warn(selected, step)
        config, groups, rewards = self.config, selected.groups, selected.groups.rewards
        if groups.steps:
            advantages = advantages.sum(-1) / selected.lengths  # mean over the tokens
        columns = {  # (N,), (N, K) or (N, G)
            "reward_std": rewards.std(1),
            "zero_variance_fraction": selected.flat,
            "reward": rewards,
            "completion_length": groups.rollouts.lengths.view(rewards.shape),
            "stop_rate": groups.has_stop,
            **{f"{FUNCTION_PREFIX}{name}": values for name, values in groups.by_function.items()},
        }
        if config.candidates_per_prompt > config.num_generations:
            best = rewards.amax(1, keepdim=True)
            weights = ((rewards - best) / config.rejection_temperature).exp()
            columns |= {
                "kept_reward": selected.rewards,
                "advantage_mean_kept": advantages,
                "effective_sample_size": effective_sample_size(weights),
            }
        for name, values in columns.items():
            of_real = values[groups.real].double()
            of_real = of_real[~of_real.isnan()]  # of a function that does not apply to a row
            self.metrics.add(name, of_real.sum(), of_real.numel())
        if config.zero_variance == "resample":
            self.metrics.add_values(replaced_groups=groups.num_replaced)

    def record_objective(
        self, metrics: Mapping[str, Tensor], mask: Tensor, num_tokens: Tensor
    ) -> None:
        """Record an objective's metrics (B, C), means over the tokens."""
        for name, values in metrics.items():
            name = name if name in PLAIN_METRICS else f"{OBJECTIVE_PREFIX}{name}"
            self.metrics.add(name, masked_sum(values, mask), num_tokens)

    def warn(self, selected: SelectedCandidates, step: int) -> None:
        """Print once on rank 0 why a step teaches nothing or the wrong thing. Collective."""
        config, groups = self.config, selected.groups
        penalty, has_stop, real = eos_penalty(config), groups.has_stop, groups.real[:, None]
        pays = torch.zeros_like(has_stop)  # not to stop
        if penalty is not None:
            below = has_stop & (groups.rewards < penalty)
            pays = ~has_stop & below.any(1, keepdim=True) & real
        counts = torch.stack([x.sum() for x in (real, selected.flat, has_stop & real, pays)])
        num_groups, num_flat, num_stopped, num_paid = distributed.all_reduce_sum(counts).tolist()
        causes = {}
        if num_stopped == 0 and penalty is not None:
            causes["no completion stopped"] = (
                f"within --max_completion_length {config.max_completion_length}, so every reward "
                f"is --missing_eos_penalty {penalty:g} and all advantages are 0: start from a "
                "model that was trained to stop, or raise that length, or use "
                "--penalize_missing_eos false."
            )
        elif num_flat >= MOST_FLAT * num_groups:
            causes["nearly all groups are flat:"] = (
                f"in {num_flat} of {num_groups} all rewards are equal, and their advantages 0."
            )
        if num_paid:
            causes["not stopping pays:"] = (
                f"--missing_eos_penalty {penalty:g} is above the reward of one that stopped, in "
                f"the groups of {num_paid} that did not; lower it below every reward."
            )
        for cause in [cause for cause in causes if cause not in self.warned]:
            self.warned.add(cause)
            distributed.print_rank0(f"warning: step {step + 1}: {cause} {causes[cause]}")
