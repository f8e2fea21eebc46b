"""The rewards of a policy's completions by two judges, and its distance from the SFT policy.

Values of single completions are kept, prompt by prompt, since intervals resample prompts.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from common import distributed, scoring, self_checks
from common.advantages import apply_missing_eos_penalty
from common.checkpoint import hf_folder
from common.checkpoint.layout import MANIFEST
from common.data import Example
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp
from common.model import load as models
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts, Sampler
from common.text.reading import held_out_split, load_examples
from experiments.runs.overoptimization.config import OveroptimizationConfig
from experiments.runs.overoptimization.curves import Values


@dataclass
class Measured:
    """K completions of each of P prompts by one policy."""

    gold: Values  # (P, K) of the judge that is not optimised
    proxy: Values  # (P, K) of the optimised reward, with its penalty for not stopping
    log_ratio: Values  # (P, K) log pi - log ref, nats: their mean is unbiased for KL(pi || ref)
    lengths: Values  # (P, K) tokens, the stop token included
    fluency: Values  # (P, K) log-prob per token under the fluency model, nats; 0 without one
    prompts: list[str]  # P
    texts: list[list[str]]  # P, K

    def __post_init__(self) -> None:
        """Take lists too."""
        for name in ("gold", "proxy", "log_ratio", "lengths", "fluency"):
            setattr(self, name, np.asarray(getattr(self, name), np.float64))


class Measurer:
    """The judges, and the SFT policy, `model_name_or_path`. In a process group of one."""

    def __init__(self, config: OveroptimizationConfig, proxy: str) -> None:
        """Load the judges, of which `proxy` is a reward model's folder, and the SFT policy."""
        self.config = config
        self.vocabulary = models.load_vocabulary(config)
        self.mesh = distributed.mesh(config.num_replicas)
        self.proxy = RewardFunctions.find([proxy], [], self.vocabulary, config)
        self.gold = RewardFunctions.find([config.gold], [], self.vocabulary, config)
        for scorer in (self.proxy, self.gold):
            scorer.load(self.mesh)
        self.reference = self.load(config.model_name_or_path)
        self.fluency_model = self.load(config.fluency_model) if config.fluency_model else None

    def load(self, path: str) -> Policy:
        """The frozen policy of a model's folder, or of a checkpoint, which is exported once."""
        if Path(path, MANIFEST).is_file():
            path = hf_folder.exported(Path(path), self.config)
        model_config = models.read_model_config(
            path, "policy", self.vocabulary.tokenizer, self.config
        )
        lm = models.load_policy(path, model_config, self.config)
        policy = fsdp.shard(Policy(lm).requires_grad_(False), self.config, self.mesh)
        self_checks.only_tokens_matter(policy, self.config)
        return policy

    def prompts(self, split: str, num_rows: int = 0) -> Sequence[Example]:
        """The first prompts of a split (0: all) as token ids."""
        return load_examples(
            self.config, self.prompts_name, split, "prompts", self.vocabulary, num_rows
        )

    @property
    def prompts_name(self) -> str:
        """The data set of the prompts."""
        return self.config.prompts_dataset_name or self.config.dataset_name

    @cached_property
    def held_out(self) -> Sequence[Example]:
        """The prompts that policies are measured on, the same for every seed.

        Raises:
            UserError: there are too few.
        """
        number = self.config.num_prompts
        examples = self.prompts(held_out_split(self.config, self.prompts_name), number)
        if len(examples) < number:
            raise UserError(f"--num_prompts is {number}; {len(examples)} held-out ones are usable.")
        return examples

    def draw(self, policy: Policy, examples: Sequence[Example], num_samples: int) -> Rollouts:
        """K completions of each prompt, at temperature 1: the policy itself."""
        sampler = Sampler(policy, self.vocabulary, self.config)
        return sampler.sample(examples, num_samples=num_samples)

    def proxy_rewards(self, examples: Sequence[Example], rollouts: Rollouts) -> Tensor:
        """(P, K) float32 of K completions of each prompt, with the penalty for not stopping."""
        rewards = self.proxy.score(examples, rollouts).total
        has_stop = rollouts.has_stop.view(rewards.shape)
        return apply_missing_eos_penalty(rewards, has_stop, self.config.missing_eos_penalty)

    def measure(self, path: str, num_samples: int) -> Measured:
        """Sample from a policy, judge its completions, and score them under the SFT policy."""
        policy, examples = self.load(path), self.held_out
        rollouts = self.draw(policy, examples, num_samples)
        del policy
        gc.collect()  # FSDP's units refer to one another: it would stay in memory with the next
        sampled = rollouts.completed(examples)
        ref_logps = self.score(self.reference, sampled, "reference")
        lengths = rollouts.lengths.view(ref_logps.shape)
        fluency = lengths * 0.0
        if self.fluency_model:
            fluency = self.score(self.fluency_model, sampled, "fluency model") / lengths
        logps = rollouts.token_logps.double().sum(1).view(ref_logps.shape)
        texts = rollouts.texts(self.vocabulary.tokenizer)
        return Measured(
            self.gold.score(examples, rollouts).total.double().numpy(),
            self.proxy_rewards(examples, rollouts).double().numpy(),
            (logps - ref_logps).numpy(),
            lengths.numpy(),
            fluency.numpy(),
            [example.prompt for example in examples],
            [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)],
        )

    def score(self, policy: Policy, sampled: Sequence[Example], title: str) -> Tensor:
        """Log-probs (P, K) of completions under a policy, nats."""
        return scoring.score_examples(policy, sampled, self.config, self.vocabulary, title)
