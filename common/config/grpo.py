"""The configuration of GRPO: its flags, the objective that they name, and what excludes what."""

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from common.advantages import REJECTION_METHODS
from common.config.engine import EngineConfig
from common.config.flags import (
    SMALLEST_TEMPERATURE,
    FrozenFlags,
    SampleTableFlags,
    flag,
    path_flag,
)
from common.config.stages import TrainConfig
from common.losses import AGGREGATIONS
from common.objectives.kinds import Advantages, PolicyObjective

DISTINCT = "_distinct"  # end of a rejection method


@dataclass
class GRPOConfig(SampleTableFlags, FrozenFlags, TrainConfig, EngineConfig):
    """Rows have the column `prompt`; any other column reaches the reward functions."""

    stage: ClassVar = "GRPO"
    objective_kinds: ClassVar = (PolicyObjective, Advantages)

    _rollouts: ClassVar = "rollouts: batch_size prompts per step"
    num_generations: int = flag(8, "completions of a prompt that are trained on", ge=2)
    num_candidates: int = flag(0, "completions sampled per prompt (0: num_generations)")
    temperature: float = flag(
        1.0, "temperature of sampling and of every log-probability", ge=SMALLEST_TEMPERATURE
    )
    top_k: int = flag(0, "sample from the k most likely tokens only (0: all)")
    top_p: float = flag(1.0, "sample from the most likely tokens that hold this share", gt=0, le=1)

    _rewards: ClassVar = "rewards"
    reward_funcs: list[str] = path_flag(
        [],
        "rewards of a completion: gold, length, overlong:FROM-TO, gsm8k, regex:PATTERN, "
        "format:PATTERN, rouge_l:COLUMN, count:TEXT, file.py:function (your file is run as code), "
        "or reward-model folders",
        required=True,
    )
    reward_weights: list[float] = flag([], "weights, one per reward function (empty: 1 each)")
    missing_eos_penalty: float = flag(-1.0, "reward of a completion that did not stop")
    penalize_missing_eos: bool = flag(
        True, "whether missing_eos_penalty is given; false: a completion keeps its own reward"
    )

    _selection: ClassVar = "selection and advantages"
    rejection_method: str = flag(
        "rso",
        "selection of the candidates that are kept; distinct: from a set of texts, as RSO's paper "
        "does, not from all",
        [*REJECTION_METHODS, f"rso{DISTINCT}", f"gumbel{DISTINCT}"],
    )
    rejection_temperature: float = flag(
        0.5, "temperature of rejection sampling, in units of reward", ge=SMALLEST_TEMPERATURE
    )
    baseline: str = flag(
        "all",
        "mean that a reward is compared with: of all candidates or the kept ones",
        ["all", "kept"],
    )
    advantages: str = path_flag(
        "group",
        "advantages: a file of common/objectives/advantages or file.py:function (your file is run "
        "as code), with settings behind a colon, as rloo:scale=group",
        required=True,
    )
    normalize_globally: bool = flag(False, "normalise kept advantages again, over all ranks")
    zero_variance: str = flag(
        "keep",
        "groups of equal rewards: keep; drop from batch and denominators; resample: put fresh "
        "prompts in their place, up to 4 times, and drop those that are left",
        ["keep", "drop", "resample"],
    )
    mask_truncated_completions: bool = flag(
        False, "completions that did not stop leave loss and denominators, not the baseline"
    )

    _held_out: ClassVar = "held-out pairs"
    eval_pairs_dataset_name: str = path_flag(
        "",
        "pairs whose dataset_test_split is evaluated too: how often beta log(pi/ref) is higher for "
        "the chosen completion, with the reference that the run starts from (empty: none)",
    )

    _objective: ClassVar = "objective"
    num_iterations: int = flag(1, "passes over the completions of a rollout", gt=0)
    num_minibatches: int = flag(1, "updates in a pass, each on its share of the prompts", gt=0)
    policy_objective: list[str] = path_flag(
        ["clip"],
        "loss: a file of common/objectives/policy or file.py:function (your file is run as code), "
        "with settings behind a colon, as clip:epsilon_low=0.2,epsilon_high=0.28; behind it files "
        "that change its loss, as sampler_weights:cap=2",
        required=True,
    )
    aggregation: str = flag(
        "grpo",
        "mean of the tokens' losses; grpo: per completion, then over completions; token: over all "
        "tokens (DAPO); constant: sum / max_completion_length (Dr. GRPO); prompt: per prompt, "
        "then over them",
        AGGREGATIONS,
    )
    entropy_coef: float = flag(0.0, "weight of each token's entropy, which is subtracted", ge=0)

    _reference: ClassVar = "tie to the reference"
    beta: float = flag(0.04, "weight of the KL to the reference, per nat (0: no reference)", ge=0)
    kl_estimator: str = flag(
        "k3",
        "estimator of the KL at each token; full: exact, over the vocabulary; k1_ratio, k3_ratio: "
        "times the probability ratio, the gradient is then that of the KL; k1_reward: taken from "
        "the reward",
        ["k2", "k3", "full", "k1_ratio", "k3_ratio", "k1_reward"],
    )
    ref_model_name_or_path: str = path_flag("", "frozen reference (empty: model_name_or_path)")
    ref_update_steps: int = flag(0, "steps between updates of the reference (0: none)")
    ref_mixup_alpha: float = flag(
        1.0, "share of the policy in the updated reference (1: a copy)", gt=0, le=1
    )

    def __post_init__(self) -> None:
        """Refuse values that no GRPO run may have."""
        super().__post_init__()
        if self.candidates_per_prompt < self.num_generations:
            most = f"at most --num_candidates, {self.num_candidates}"
            raise self.refused("num_generations", most)
        if self.eval_pairs_dataset_name and not (self.dataset_test_split and self.beta):
            where = "without --dataset_test_split, and with --beta 0, which has no reference"
            raise self.refused("eval_pairs_dataset_name", f"empty {where}")
        if self.lora_r and self.ref_update_steps:
            raise self.refused("ref_update_steps", "0 with --lora_r: only whole models move")
        if self.num_minibatches > self.batch_size:
            raise self.refused("num_minibatches", f"at most --batch_size, {self.batch_size}")
        if self.has_kl_in_reward:
            refuse_kl_in_reward(self)

    @property
    def candidates_per_prompt(self) -> int:
        """Completions sampled per prompt."""
        return self.num_candidates or self.num_generations

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `Sampler.sample` that say how completions are drawn."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the KL is subtracted from the reward, and is not in the loss."""
        return self.beta > 0 and self.kl_estimator == "k1_reward"

    @property
    def has_exact_kl(self) -> bool:
        """Whether the KL is computed over the vocabulary."""
        return self.beta > 0 and self.kl_estimator == "full"

    def find_objective(self) -> tuple[PolicyObjective, Advantages]:
        """The policy objective and the advantages, with their settings; runs a user's files.

        A UserError if they do not go with each other or with a flag.
        """
        objective = PolicyObjective.find(*self.policy_objective)
        if objective.weighs_samples and objective.has_ratio_to_sampler:
            raise objective.refused("has a ratio to the sampler, and weights by that ratio")
        if objective.weighs_samples and (self.top_p < 1 or self.top_k > 0):
            where = "with --top_p below 1 or --top_k above 0"
            reason = "has no weights of samples: sampler and trainer have different supports"
            raise objective.refused(f"{reason} {where}")
        advantages = Advantages.find(self.advantages)
        objective.refuse_order()
        objective.refuse_values()
        advantages.refuse_values()
        least, where = advantages.min_reward, f"with --advantages {self.advantages}"
        if self.penalize_missing_eos and self.missing_eos_penalty < least:
            raise self.refused("missing_eos_penalty", f"at least {least:g} {where}")
        why = f"of rewards >= {least:g}" if least > -inf else ""
        why = "which has no term for it" if advantages.takes_each_function else why
        if why and self.has_kl_in_reward:
            raise self.refused("kl_estimator", f"another one {where}, {why}")
        return objective, advantages


def refuse_kl_in_reward(config: GRPOConfig) -> None:
    """Raise a UserError where completions without a reference's log-prob have a reward."""
    where = "with --kl_estimator k1_reward"
    if config.zero_variance != "keep":
        reason = "completions of equal rewards still differ in their KL"
        raise config.refused("zero_variance", f"keep {where}: {reason}")
    if config.baseline == "all" and config.candidates_per_prompt > config.num_generations:
        reason = "only kept completions are scored by the reference"
        raise config.refused("baseline", f"kept {where}: {reason}")
    if config.mask_truncated_completions:
        reason = "masked completions are not scored by the reference"
        raise config.refused("mask_truncated_completions", f"false {where}: {reason}")
