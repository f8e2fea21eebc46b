"""What a policy's own completions are worth to two judges, and how far it is from where it began.

Values of single completions are kept, prompt by prompt, since everything that is concluded from
them resamples prompts.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common import data, distributed, self_checks
from common.advantages import apply_missing_eos_penalty
from common.checkpoint import plain
from common.checkpoint.files import MANIFEST
from common.data import Example
from common.errors import UserError
from common.evaluation import pair_scores, score
from common.evaluation.intervals import PreferenceAccuracy, preference_accuracy
from common.model import fsdp
from common.model import load as models
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts, Sampler
from common.scoring import Policy
from experiments.overoptimization.config import OveroptimizationConfig

Values = NDArray[np.float64]


@dataclass
class Measured:
    """K completions of each of P prompts by one policy."""

    gold: Values  # (P, K) of the judge that stands for what is wanted
    proxy: Values  # (P, K) of the reward trained on, with its penalty for not stopping
    log_ratio: Values  # (P, K) log pi - log ref, nats: their mean is unbiased for KL(pi || ref)
    length: float  # mean number of tokens, stop token included
    stop_rate: float  # share of the completions that stopped by themselves

    def __post_init__(self) -> None:
        """Take lists too."""
        for name in ("gold", "proxy", "log_ratio"):
            setattr(self, name, np.asarray(getattr(self, name)))


class Measurer:
    """The judges, and the policy that all others are compared with. In a process group of one."""

    def __init__(self, config: OveroptimizationConfig, proxy: str) -> None:
        """Load the judges, of which `proxy` is a reward model's folder, and the reference.

        The `model_name_or_path` of the config is that policy, its `seed` of the sampling noise.
        """
        self.config = config
        self.tokenizer = models.load_tokenizer(config.tokenizer_path, config)
        path = config.model_name_or_path
        self.stop_ids = models.stop_token_ids(self.tokenizer, config, [path])
        self.mesh = distributed.mesh(config.num_replicas)
        self.proxy = RewardFunctions.find([proxy], [], self.tokenizer, config)
        self.gold = RewardFunctions.find([config.gold], [], self.tokenizer, config)
        for scorer in (self.proxy, self.gold):
            scorer.load(self.mesh)
        self.reference = self.load(config.model_name_or_path)

    def load(self, path: str) -> Policy:
        """The frozen policy of a model's folder, or of a checkpoint, which is exported once."""
        if Path(path, MANIFEST).is_file():
            path = plain.exported(Path(path), self.config)
        model_config = models.read_model_config(path, "policy", self.tokenizer, self.config)
        lm = models.load_policy(path, model_config, self.config)
        policy = fsdp.shard(Policy(lm).requires_grad_(False), self.config, self.mesh)
        self_checks.only_tokens_matter(policy, self.config)
        return policy

    def examples(self, split: str, kind: str, num_rows: int = 0) -> Sequence[Example]:
        """The first rows of a split (0: all) as token ids."""
        config, rest = self.config, (kind, self.tokenizer, self.stop_ids, num_rows)
        prompts_name = config.prompts_dataset_name or config.dataset_name
        name = prompts_name if kind == "prompts" else config.dataset_name
        return data.load_examples(config, name, split, *rest)

    @cached_property
    def held_out(self) -> Sequence[Example]:
        """The prompts that policies are measured on, the same for every seed.

        Raises:
            UserError: there are too few, or a judge cannot read them.
        """
        number = self.config.num_prompts
        examples = self.examples(self.config.dataset_test_split, "prompts", number)
        if len(examples) < number:
            raise UserError(f"--num_prompts is {number}; {len(examples)} held-out ones are usable.")
        for scorer in (self.proxy, self.gold):
            scorer.check_rows(examples)
        return examples

    def draw(self, policy: Policy, examples: Sequence[Example], num_samples: int) -> Rollouts:
        """K completions of each prompt, at temperature 1: the policy itself."""
        sampler = Sampler(policy, self.tokenizer, self.stop_ids, self.config)
        return sampler.sample(examples, num_samples=num_samples)

    def proxy_rewards(self, examples: Sequence[Example], rollouts: Rollouts) -> Tensor:
        """(P, K) float32 of K completions of each prompt, with the penalty for not stopping."""
        rewards = self.proxy.score(examples, rollouts).total
        has_stop = rollouts.has_stop.view(rewards.shape)
        return apply_missing_eos_penalty(rewards, has_stop, self.config.missing_eos_penalty)

    def measure(self, path: str, num_samples: int) -> Measured:
        """Sample from a policy, judge what it wrote, and score it under the reference."""
        policy, examples = self.load(path), self.held_out
        rollouts = self.draw(policy, examples, num_samples)
        del policy
        gc.collect()  # FSDP's units refer to one another: it would stay beside the next one
        arguments = (rollouts.completed(examples), self.config, self.tokenizer.pad_token_id)
        ref_logps = score.score_examples(self.reference, *arguments, "reference")  # (P, K)
        logps = rollouts.token_logps.double().sum(1).view(ref_logps.shape)
        return Measured(
            self.gold.score(examples, rollouts).total.double().numpy(),
            self.proxy_rewards(examples, rollouts).double().numpy(),
            (logps - ref_logps).numpy(),
            float(rollouts.lengths.double().mean()),
            float(rollouts.has_stop.double().mean()),
        )

    def proxy_accuracy(self) -> PreferenceAccuracy:
        """How often the proxy prefers the chosen one of held-out pairs."""
        config, (judge,) = self.config, self.proxy.reward_models.values()
        pairs = self.examples(config.dataset_test_split, "preference", config.num_eval_rows)
        arguments = (judge, pairs, self.tokenizer, self.stop_ids, config)
        return preference_accuracy(*pair_scores.reward_scores(*arguments).T)
