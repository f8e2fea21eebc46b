"""The configuration of GRPO: one flag per variant, and which of them exclude each other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from common.advantages import BASELINES, REJECTION_METHODS, SCALES
from common.config.flags import SMALLEST_TEMPERATURE, FrozenFlags, SampleTableFlags, flag, path_flag
from common.config.stages import TrainConfig
from common.grpo.sampler_correction import SAMPLER_CORRECTIONS
from common.losses import AGGREGATIONS, KL_ESTIMATORS
from common.sampling.vllm.config import EngineConfig

if TYPE_CHECKING:
    from common.objectives.find import PolicyObjective

BOUNDS = ("epsilon_low", "epsilon_high")  # settings of objectives that are flags


@dataclass
class GRPOConfig(SampleTableFlags, FrozenFlags, TrainConfig, EngineConfig):
    """Rows have the column `prompt`; any other column reaches the reward functions."""

    stage: ClassVar = "GRPO"
    eval_metrics: ClassVar = ("eval_reward", "eval_stop_rate", "eval_accuracy")

    _rollouts: ClassVar = "rollouts: batch_size prompts per step"
    num_generations: int = flag(8, "completions of a prompt that are trained on", ge=2)
    num_candidates: int = flag(0, "completions sampled per prompt (0: num_generations)")
    temperature: float = flag(
        1.0, "of sampling and of every log-probability", ge=SMALLEST_TEMPERATURE
    )
    top_k: int = flag(0, "sample from the k most likely tokens only (0: all)")
    top_p: float = flag(1.0, "sample from the most likely tokens that hold this share", gt=0, le=1)

    _rewards: ClassVar = "rewards"
    reward_funcs: list[str] = path_flag(
        [],
        "gold, length, gsm8k, regex:PATTERN, format:PATTERN, rouge_l:COLUMN, count:TEXT, "
        "file.py:function (your file is run as code), or reward-model folders",
        required=True,
    )
    reward_weights: list[float] = flag([], "one per reward function (empty: 1 each)")
    missing_eos_penalty: float = flag(-1.0, "reward of a completion that did not stop")
    penalize_missing_eos: bool = flag(True, "false: such a completion keeps its own reward")
    overlong_buffer: int = flag(
        0, "tokens before max_completion_length over which the reward falls by up to 1 (0: none)"
    )

    _selection: ClassVar = "selection and advantages"
    rejection_method: str = flag("rso", "how candidates are kept", REJECTION_METHODS)
    rejection_temperature: float = flag(
        0.5, "of rejection sampling, in units of reward", ge=SMALLEST_TEMPERATURE
    )
    distinct_candidates: bool = flag(
        False, "rso and gumbel draw from a set of texts, as RSO's paper does, not from all samples"
    )
    baseline: str = flag("all", "mean over all candidates or the kept ones", ["all", "kept"])
    advantage_baseline: str = flag(
        "mean", "subtract the mean of the group, or of the other completions (RLOO)", BASELINES
    )
    scale_rewards: str = flag(
        "group",
        "divide by the standard deviation of the group, of the batch, or by none; mean: by the "
        "group's mean reward (MaxRL)",
        SCALES,
    )
    multi_objective_aggregation: str = flag(
        "sum_then_normalize",
        "weighted rewards are summed, then normalised; normalize_then_sum: normalised one by one, "
        "then summed with their weights, then normalised over the batch (GDPO)",
        ["sum_then_normalize", "normalize_then_sum"],
    )
    normalize_globally: bool = flag(False, "normalise kept advantages again, over all ranks")
    zero_variance: str = flag(
        "keep",
        "groups of equal rewards: keep; drop from batch and denominators; resample: put fresh "
        "prompts in their place, and drop those that are left",
        ["keep", "drop", "resample"],
    )
    max_resamples: int = flag(
        4, "rounds of fresh prompts in a step with zero_variance resample", gt=0
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
    policy_objective: str = path_flag(
        "clip", "a file of common/objectives/policy; file.py:function (your file is run as code)"
    )
    objective_args: list[str] = flag([], "its settings, as tau_pos=1 (empty: its defaults)")
    epsilon_low: float = flag(-1.0, "clip the ratio below 1 - it (-1: objective's default)", ge=-1)
    epsilon_high: float = flag(-1.0, "clip the ratio above 1 + it (-1: as above)", ge=-1)
    off_policy_mask_threshold: float = flag(
        0.0,
        "completions with a negative advantage leave the policy term where the sampler's mean "
        "log-prob is higher by more than this, nats per token (0: none do)",
        ge=0,
    )
    aggregation: str = flag(
        "grpo",
        "grpo: mean per completion, then over completions; token: over all tokens (DAPO); "
        "constant: sum / max_completion_length (Dr. GRPO); prompt: mean per prompt, then over them",
        AGGREGATIONS,
    )
    entropy_coef: float = flag(0.0, "weight of each token's entropy, which is subtracted", ge=0)
    sampler_correction: str = flag(
        "none", "weigh by trainer / sampler probability, truncated or masked", SAMPLER_CORRECTIONS
    )
    sampler_correction_cap: float = flag(
        2.0, "largest weight, of geometric_mask the largest mean", ge=1
    )
    sampler_correction_floor: float = flag(0.0, "smallest weight of a mask (0: 1 / cap)", ge=0)
    sampler_drift_coef: float = flag(
        0.0, "weight of the squared log-ratio of policy to sampler, which is added", ge=0
    )

    _reference: ClassVar = "tie to the reference"
    beta: float = flag(0.04, "weight of the KL to the reference, per nat (0: no reference)", ge=0)
    kl_estimator: str = flag(
        "k3", "of the KL at each token; full: exact, over the vocabulary", (*KL_ESTIMATORS, "full")
    )
    kl_in: str = flag(
        "loss", "add beta KL to the loss, or subtract it from the reward", ["loss", "reward"]
    )
    kl_correction: bool = flag(
        False, "multiply the estimate by the ratio: its gradient is then that of the KL"
    )
    ref_model_name_or_path: str = path_flag("", "frozen reference (empty: model_name_or_path)")
    ref_update_steps: int = flag(0, "steps between updates of the reference (0: none)")
    ref_mixup_alpha: float = flag(
        1.0, "share of the policy in the updated reference (1: a copy)", gt=0, le=1
    )

    def __post_init__(self) -> None:
        """Refuse values that no GRPO run may have."""
        from common.rewards.functions import short_names

        super().__post_init__()
        self.num_candidates = self.num_candidates or self.num_generations
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path
        if self.num_candidates < self.num_generations:
            most = f"at most --num_candidates, {self.num_candidates}"
            raise self.refused("num_generations", most)
        if self.eval_pairs_dataset_name and not (self.dataset_test_split and self.beta):
            where = "without --dataset_test_split, and with --beta 0, which has no reference"
            raise self.refused("eval_pairs_dataset_name", f"empty {where}")
        if self.metric_for_best_model == "eval_accuracy" and not self.eval_pairs_dataset_name:
            reason = "without --eval_pairs_dataset_name"
            raise self.refused("metric_for_best_model", f"another one {reason}")
        kind, slash, function = self.metric_for_best_model.partition("/")  # eval_reward/gold
        functions = short_names(self.reward_funcs).values()
        if slash and kind.endswith("reward") and function not in functions:
            raise self.refused("metric_for_best_model", f"{kind}/ and one of {[*functions]}")
        refuse_rollouts(self)
        for name in BOUNDS:
            if -1 < getattr(self, name) < 0:
                raise self.refused(name, "at least 0, or -1")
        settings = self.objective.settings.copy()
        self.epsilon_low, self.epsilon_high = (settings.pop(name, -1.0) for name in BOUNDS)
        self.objective_args = [f"{name}={value}" for name, value in settings.items()]
        refuse_objective(self)
        if self.beta > 0:
            refuse_reference(self)
            refuse_kl(self)

    @property
    def objective(self) -> "PolicyObjective":
        """The policy objective with its settings."""
        from common.objectives.find import find_policy_objective

        bounds = {name: getattr(self, name) for name in BOUNDS if getattr(self, name) >= 0}
        return find_policy_objective(self.policy_objective, self.objective_args, **bounds)

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `Sampler.sample` that say how completions are drawn."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def num_updates(self) -> int:
        """Optimiser steps per rollout."""
        return self.num_iterations * self.num_minibatches

    @property
    def is_multi_objective(self) -> bool:
        """Whether each reward function is normalised by itself (GDPO)."""
        return self.multi_objective_aggregation == "normalize_then_sum"

    def objective_weights(self, num_objectives: int) -> list[float]:
        """Weights of what is normalised: of the total, which has been weighted, 1."""
        weights = self.reward_weights if self.is_multi_objective else []
        return weights or [1.0] * num_objectives

    @property
    def has_exact_kl(self) -> bool:
        """Whether the KL is computed over the vocabulary."""
        return self.beta > 0 and self.kl_estimator == "full"


def refuse_rollouts(config: GRPOConfig) -> None:
    """Raise a UserError for settings of sampling, selection and objective that do not fit."""
    if config.sampler_correction != "none" and (config.top_p < 1 or config.top_k > 0):
        where = "with --top_p below 1 or --top_k above 0"
        reason = "sampler and trainer have different supports"
        raise config.refused("sampler_correction", f"none {where}: {reason}")
    if config.overlong_buffer >= config.max_completion_length:
        most = f"below --max_completion_length, {config.max_completion_length}"
        raise config.refused("overlong_buffer", most)
    if config.num_minibatches > config.batch_size:
        raise config.refused("num_minibatches", f"at most --batch_size, {config.batch_size}")


def refuse_objective(config: GRPOConfig) -> None:
    """Raise a UserError for flags that an objective does not go with."""
    is_weighted = config.sampler_correction not in ("none", "geometric_mask")
    if config.objective.corrects_sampler and is_weighted:
        name = config.policy_objective
        where = f"with --policy_objective {name}, whose ratio is that to the sampler"
        raise config.refused("sampler_correction", f"none or geometric_mask {where}")
    is_negative = config.penalize_missing_eos and config.missing_eos_penalty < 0
    if config.scale_rewards == "mean" and is_negative:
        raise config.refused("missing_eos_penalty", "at least 0 with --scale_rewards mean")
    where = ""
    if config.scale_rewards == "mean":
        where = "with --scale_rewards mean, which needs rewards of at least 0"
    elif config.is_multi_objective:
        where = "with --multi_objective_aggregation normalize_then_sum, which has no term for it"
    if where and config.overlong_buffer:
        raise config.refused("overlong_buffer", f"0 {where}")
    if where and config.kl_in == "reward":
        raise config.refused("kl_in", f"loss {where}")


def refuse_reference(config: GRPOConfig) -> None:
    """Raise a UserError for a moving reference that cannot take the adapters."""
    if not (config.lora_r and config.ref_update_steps):
        return
    if config.ref_mixup_alpha != 1:
        reason = "a mixture of two adapters has a higher rank"
        raise config.refused("ref_mixup_alpha", f"1 with --lora_r: {reason}")
    if config.ref_model_name_or_path != config.model_name_or_path:
        where = "with --lora_r and --ref_update_steps"
        raise config.refused("ref_model_name_or_path", f"empty {where}: the policy's own move")


def refuse_kl(config: GRPOConfig) -> None:
    """Raise a UserError for a KL that does not fit where it is used."""
    estimator = config.kl_estimator
    if config.kl_correction and estimator not in ("k1", "k3"):
        reason = "full is exact without it, and k2 times the ratio has another gradient than the KL"
        raise config.refused("kl_correction", f"false with --kl_estimator {estimator}: {reason}")
    if config.kl_in == "loss":
        if estimator == "k1" and not config.kl_correction:
            others = "k2, k3 or full, or with --kl_correction true or --kl_in reward"
            raise config.refused("kl_estimator", f"{others}: as a loss its expected gradient is 0")
        return
    where = "with --kl_in reward"
    if estimator != "k1":
        raise config.refused("kl_estimator", f"k1 {where}")
    if config.kl_correction:
        raise config.refused("kl_correction", f"false {where}")
    if config.zero_variance != "keep":
        reason = "completions of equal rewards still differ in their KL"
        raise config.refused("zero_variance", f"keep {where}: {reason}")
    if config.baseline == "all" and config.num_candidates > config.num_generations:
        reason = "only kept completions are scored by the reference"
        raise config.refused("baseline", f"kept {where}: {reason}")
    if config.mask_truncated_completions:
        reason = "masked completions are not scored by the reference"
        raise config.refused("mask_truncated_completions", f"false {where}: {reason}")
