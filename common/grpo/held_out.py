"""What GRPO's policy is worth on held-out prompts and pairs while it trains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from common import distributed
from common.data import Example
from common.errors import EngineError
from common.evaluation import intervals, score
from common.grpo.config import GRPOConfig
from common.grpo.rollouts import reward
from common.model import fsdp
from common.padding import AnyBatch
from common.record.glossary import FUNCTION_PREFIX, with_interval
from common.record.logger import RunLogger
from common.sampling.sampler import Rollouts, Sampler
from common.scoring import Policy

if TYPE_CHECKING:
    from common.model.lora import AdapterReference
    from common.rewards.score import RewardFunctions


@dataclass
class HeldOut:
    """Held-out prompts and pairs, and all that judges a policy on them; either may be empty.

    Every prompt is completed once, as in training, and with the same noise at every step: what
    differs between two steps is the policy. More prompts say more than more samples of each.
    """

    sampler: Sampler
    scorer: "RewardFunctions"
    reference: "Policy | AdapterReference | None"
    prompts: Sequence[Example]
    pairs: Sequence[Example]
    config: GRPOConfig

    def __post_init__(self) -> None:
        """Score the pairs with the reference that the run starts from. Collective.

        It stays what accuracies compare with where `ref_update_steps` moves the reference.
        """
        self.ref_logps: Tensor | None = None  # (pairs, 2)
        if self.pairs and self.reference is not None:
            self.ref_logps = score.score_examples(
                self.reference, self.pairs, self.config, self.sampler.vocabulary, "reference"
            )

    def log(self, logger: RunLogger, step: int) -> None:
        """Evaluate after so many steps. Collective."""
        if metrics := self.measure(step, logger.total_steps):
            logger.log(step, metrics)

    def measure(self, step: int, total_steps: int) -> dict[str, float]:
        """Metrics by name, each with its 95% interval, after `step` of `total_steps`. Collective.

        Nothing that training draws or counts is changed. Where vLLM fails, a warning tells of it
        and only the pairs are judged: what fails again in training ends the run, and is saved.
        """
        metrics: dict[str, float] = {}
        try:
            metrics |= self.of_prompts(step, total_steps) if self.prompts else {}
        except EngineError as error:
            distributed.print_rank0(f"warning: held-out prompts are not evaluated: {error}")
        if self.pairs:
            accuracy, _ = score.preferences(
                self.sampler.policy,
                self.pairs,
                self.config,
                self.sampler.vocabulary,
                score.ImplicitReward(),
                self.ref_logps,
            )
            metrics |= accuracy.metrics
        return metrics

    def of_prompts(self, step: int, total_steps: int) -> dict[str, float]:
        """What the policy's completions of all prompts get, and where it has moved. Collective."""
        config, prompts = self.config, self.prompts
        rollouts = self.sampler.sample_shared(
            prompts,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            title="evaluating",
        )
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
            known = [None if math.isnan(value) else value for value in values.tolist()]
            is_share = name in checks or name == "eval_stop_rate"
            over = intervals.share_over_prompts if is_share else intervals.mean_over_prompts
            if own := over(known, keys):
                metrics |= with_interval(name, own["mean"], own["low"], own["high"])
        return metrics

    def rewards(self, rollouts: Rollouts, step: int, total_steps: int) -> dict[str, Tensor]:
        """Rewards (N,) by metric, of which every rank computes a share of the prompts. Collective.

        The ranks call the functions equally often, with equally many prompts; nan where a function
        does not apply.
        """
        number, world_size = len(self.prompts), distributed.world_size()
        own = list(range(distributed.rank(), number, world_size))
        rows = own + [0] * (-(-number // world_size) - len(own))  # which count nowhere
        examples = [self.prompts[row] for row in rows]
        drawn = rollouts[torch.tensor(rows)]
        scored = reward(self.scorer, examples, drawn, self.config, step, total_steps)
        by_name = {f"eval_{FUNCTION_PREFIX}{name}": v for name, v in scored.by_function.items()}
        by_name = {"eval_reward": scored.total, **by_name}  # (n, 1) each
        values = torch.zeros(number, len(by_name), dtype=torch.float64)
        values[own] = torch.cat(list(by_name.values()), dim=1)[: len(own)].double()
        return dict(zip(by_name, distributed.all_reduce_sum(values).unbind(1), strict=True))

    def log_ratios(self, reference: nn.Module, sampled: Sequence[Example]) -> Tensor:
        """Log pi - log ref (N,) of completions from pi, whose mean is unbiased for the KL.

        At the temperature of sampling, in nats. Collective.
        """
        at = self.config.temperature

        def log_ratio(policy: nn.Module, batch: AnyBatch) -> Tensor:  # (B,)
            own, ref = (model(batch, temperature=at).token_logps for model in (policy, reference))
            return torch.sum(own - ref, -1)  # over (B, C)

        policy, vocabulary = self.sampler.policy, self.sampler.vocabulary
        log_ratios = score.score_examples(
            policy, sampled, self.config, vocabulary, "evaluating", score=log_ratio
        )
        fsdp.reshard(reference)
        return log_ratios.squeeze(1)
