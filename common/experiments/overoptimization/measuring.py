"""What a policy's own completions are worth to two judges, and how far it is from where it began.

Values of single completions are kept, prompt by prompt, since everything that is concluded from
them resamples prompts.
"""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common import distributed, self_checks
from common.advantages import apply_missing_eos_penalty
from common.checkpoint import state
from common.checkpoint.files import MANIFEST
from common.config import CommonConfig
from common.data import Example
from common.evaluation import score
from common.evaluation.intervals import PreferenceAccuracy
from common.model import fsdp
from common.model import load as models
from common.record.jsonl import write_atomically
from common.rewards.models import RewardModelFunction
from common.rewards.scorer import RewardScorer
from common.sampling.sampler import Rollouts, Sampler
from common.scoring import Policy

Values = NDArray[np.float64]


@dataclass
class Measured:
    """K completions of each of P prompts by one policy."""

    gold: Values  # (P, K) of the judge that stands for what is wanted
    proxy: Values  # (P, K) of the reward trained on, with its penalty for not stopping
    log_ratio: Values  # (P, K) log pi - log ref, nats: their mean is unbiased for KL(pi || ref)
    length: float  # mean number of tokens, stop token included
    stop_rate: float  # share of the completions that stopped by themselves


class Measurer:
    """The judges, and the policy that all others are compared with. In a process group of one."""

    def __init__(
        self,
        config: CommonConfig,
        tokenizer: Any,
        *,
        reference: str,
        proxy: str,
        gold: str,
        missing_eos_penalty: float | None,
    ) -> None:
        """Load judges and reference.

        Args:
            config: limits of lengths and batches, and the seed of the sampling noise.
            tokenizer: of all policies.
            reference: folder of the policy at distance 0.
            proxy: reward function or folder of a reward model.
            gold: the same.
            missing_eos_penalty: proxy reward of a completion that did not stop (None: its own).
        """
        self.config, self.tokenizer = config, tokenizer
        self.stop_ids = models.stop_token_ids(tokenizer, config.stop_token)
        self.missing_eos_penalty = missing_eos_penalty
        self.reference_path = reference
        self.mesh = distributed.mesh(config.num_replicas)
        self.proxy = RewardScorer([proxy], [], tokenizer, config)
        self.gold = RewardScorer([gold], [], tokenizer, config)
        for scorer in (self.proxy, self.gold):
            scorer.load(self.mesh)
        self.reference = self.load(reference)

    def load(self, path: str) -> Policy:
        """The frozen policy of a model's folder, or of a checkpoint of a run begun with one."""
        is_checkpoint = Path(path, MANIFEST).is_file()
        base = self.reference_path if is_checkpoint else path
        model_config = models.read_model_config(base, "policy", self.tokenizer, self.config)
        lm = models.load_policy(base, model_config, self.config)
        policy = fsdp.shard(Policy(lm).requires_grad_(False), self.config, self.mesh)
        self_checks.loaded_model(policy, self.config)
        if is_checkpoint:
            state.restore_parameters(Path(path), policy)
        return policy

    def draw(self, policy: Policy, examples: Sequence[Example], num_samples: int) -> Rollouts:
        """K completions of each prompt, at temperature 1: the policy itself."""
        sampler = Sampler(policy, self.tokenizer, self.stop_ids, self.config)
        return sampler.sample(examples, num_samples=num_samples)

    def proxy_rewards(self, examples: Sequence[Example], rollouts: Rollouts) -> Tensor:
        """(P, K) float32 of K completions of each prompt, with the penalty for not stopping."""
        rewards = self.proxy.score(examples, rollouts).total
        has_stop = rollouts.has_stop.view(rewards.shape)
        return apply_missing_eos_penalty(rewards, has_stop, self.missing_eos_penalty)

    def judged(self, examples: Sequence[Example], rollouts: Rollouts) -> Measured:
        """What both judges say of K completions of each prompt, at distance 0 so far."""
        gold = self.gold.score(examples, rollouts).total
        return Measured(
            gold.double().numpy(),
            self.proxy_rewards(examples, rollouts).double().numpy(),
            np.zeros(gold.shape),
            float(rollouts.lengths.double().mean()),
            float(rollouts.has_stop.double().mean()),
        )

    def pool(self, examples: Sequence[Example], num_samples: int) -> Measured:
        """Completions of the reference itself."""
        return self.judged(examples, self.draw(self.reference, examples, num_samples))

    def measure(self, path: str, examples: Sequence[Example], num_samples: int) -> Measured:
        """Sample from a policy, judge what it wrote, and score it under the reference."""
        policy = self.load(path)
        rollouts = self.draw(policy, examples, num_samples)
        del policy
        gc.collect()  # FSDP's units refer to one another: it would stay beside the next one
        measured = self.judged(examples, rollouts)
        pad_id = self.tokenizer.pad_token_id
        arguments = (rollouts.completed(examples), self.config, pad_id, "reference")
        ref_logps = score.score_examples(self.reference, *arguments)  # (P, K)
        logps = rollouts.token_logps.double().sum(1).view(ref_logps.shape)
        return replace(measured, log_ratio=(logps - ref_logps).numpy())

    def proxy_accuracy(self, pairs: Sequence[Example]) -> PreferenceAccuracy | None:
        """How often the proxy agrees with the labels of pairs; None of one that is no model."""
        for function in self.proxy.reward_models.values():
            if isinstance(function, RewardModelFunction) and function.model is not None:
                pad_id = self.tokenizer.pad_token_id
                return score.preferences(function.model, pairs, self.config, pad_id)[0]
        return None


# ---- kept, so that nothing is measured twice -----------------------------------------------------


def read(path: Path, made_by: Mapping[str, Any]) -> Measured | None:
    """What was measured before of the same thing, None if it was of another or nothing."""
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record.pop("made_by") != made_by:
        return None
    record |= {name: np.array(record[name]) for name in ("gold", "proxy", "log_ratio")}
    return Measured(**record)


def write(path: Path, made_by: Mapping[str, Any], measured: Measured) -> None:
    """Keep what was measured; a file is whole or not there."""
    record = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in asdict(measured).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [json.dumps({"made_by": made_by, **record}) + "\n"])
