"""Evaluation of GRPO's policy on held-out prompts and pairs during training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common import distributed
from common.batch import AnyBatch
from common.config.grpo import GRPOConfig
from common.evaluation import accuracy, intervals, scoring
from common.forward import Policy
from common.grpo.rollouts import reward
from common.model import fsdp
from common.model.lora import AdapterReference
from common.record.glossary import FUNCTION_PREFIX, with_interval
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts, Sampler
from common.text.example import Example


@dataclass
class HeldOut:
    """Held-out prompts and pairs, of which either may be empty, and the judges of a policy on them.

    Every prompt is completed once, as in training, and with the same noise at every step, so that
    only the policy differs between two steps. More prompts give a smaller error than more samples.
    """

    sampler: Sampler
    scorer: RewardFunctions
    reference: Policy | AdapterReference | None
    prompts: Sequence[Example]
    pairs: Sequence[Example]
    config: GRPOConfig

    def __post_init__(self) -> None:
        """Score the pairs with the reference that the run starts from. Collective."""
        self.ref_logps: Tensor | None = None  # (pairs, 2)
        if self.pairs and self.reference is not None:
            self.ref_logps = scoring.score_examples(
                self.reference, self.pairs, self.config, self.sampler.vocabulary, "reference"
            )

    def measure(self, step: int, total_steps: int) -> dict[str, float]:
        """Metrics by name with their 95% intervals; training is not affected. Collective."""
        metrics = self.of_prompts(step, total_steps) if self.prompts else {}
        if self.pairs:
            policy, vocabulary = self.sampler.policy, self.sampler.vocabulary
            logps = scoring.score_examples(
                policy, self.pairs, self.config, vocabulary, "scoring pairs"
            )
            rewards = logps if self.ref_logps is None else logps - self.ref_logps  # (pairs, 2)
            outcomes = accuracy.outcomes(*rewards.unbind(1))
            metrics |= accuracy.preference_accuracy(outcomes).metrics
        return metrics

    def of_prompts(self, step: int, total_steps: int) -> dict[str, float]:
        """Rewards, lengths, stops and KL of the policy's completions of all prompts. Collective."""
        config, prompts = self.config, self.prompts
        rollouts = self.sampler.sample_shared(prompts, title="evaluating", **config.sampling)
        measured = self.rewards(rollouts, step, total_steps)  # (N,) each
        checks = {n for n, v in measured.items() if {*v[~v.isnan()].tolist()} <= {0, 1}}
        if checks != measured.keys():  # a total of other things is no share
            checks.discard("eval_reward")
        measured["eval_completion_length"] = rollouts.lengths
        if self.reference is not None:
            measured["eval_kl"] = self.log_ratios(self.reference, rollouts.completed(prompts))
        measured["eval_stop_rate"] = rollouts.has_stop.double()
        keys, metrics = [example.prompt for example in prompts], dict[str, float]()
        for name, values in measured.items():
            rows = [None if math.isnan(value) else value for value in values.tolist()]
            is_share = name in checks or name == "eval_stop_rate"
            over = intervals.share_over_prompts if is_share else intervals.mean_over_prompts
            if mean := over(rows, keys):
                metrics |= with_interval(name, mean.mean, mean.low, mean.high)
        return metrics

    def rewards(self, rollouts: Rollouts, step: int, total_steps: int) -> dict[str, Tensor]:
        """Rewards (N,) by metric, nan where a function does not apply. Collective.

        Every rank computes a share of the prompts, all equally many.
        """
        number, world_size = len(self.prompts), distributed.world_size()
        mine = list(range(distributed.rank(), number, world_size))
        rows = mine + [0] * (-(-number // world_size) - len(mine))  # filler, which counts nowhere
        examples, drawn = [self.prompts[row] for row in rows], rollouts[torch.tensor(rows)]
        scored = reward(self.scorer, examples, drawn, self.config, step, total_steps)
        by_name = {f"eval_{FUNCTION_PREFIX}{name}": v for name, v in scored.by_function.items()}
        by_name = {"eval_reward": scored.total, **by_name}  # (n, 1) each
        values = torch.zeros(number, len(by_name), dtype=torch.float64)
        values[mine] = torch.cat(list(by_name.values()), dim=1)[: len(mine)].double()
        return dict(zip(by_name, distributed.all_reduce_sum(values).unbind(1), strict=True))

    def log_ratios(self, reference: nn.Module, sampled: Sequence[Example]) -> Tensor:
        """Log pi - log ref (N,) of completions from pi, whose mean is unbiased for the KL.

        At the temperature of sampling, in nats. Collective.
        """
        at = self.config.temperature

        def log_ratio(policy: nn.Module, batch: AnyBatch) -> Tensor:  # (B,)
            logps = policy(batch, temperature=at).token_logps  # (B, C)
            return torch.sum(logps - reference(batch, temperature=at).token_logps, -1)

        policy, vocabulary = self.sampler.policy, self.sampler.vocabulary
        log_ratios = scoring.score_examples(
            policy, sampled, self.config, vocabulary, "evaluating", score=log_ratio
        )
        fsdp.reshard(reference)
        return log_ratios.squeeze(1)
