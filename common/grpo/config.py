"""The configuration of GRPO: one flag per variant, and which of them exclude each other."""

from dataclasses import dataclass

from common.advantages import BASELINES, REJECTION_METHODS, SCALES
from common.config import (
    UserError,
    knob,
    require_finite,
    require_not_negative,
    require_positive,
)
from common.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_OBJECTIVES,
    RATIO_LEVELS,
    SAMPLER_CORRECTIONS,
)
from common.model.lora import LoraTrainConfig


@dataclass
class GRPOConfig(LoraTrainConfig):
    """Rows have the column `prompt`; any other column reaches the reward functions."""

    # --- rollouts: batch_size prompts per step ---
    num_generations: int = knob(8, "completions of a prompt that are trained on")
    num_candidates: int = knob(0, "completions sampled per prompt (0: num_generations)")
    temperature: float = knob(1.0, "of sampling and of every log-probability")
    top_k: int = knob(0, "sample from the k most likely tokens only (0: all)")
    top_p: float = knob(1.0, "sample from the most likely tokens that hold this share only")

    # --- rewards ---
    reward_funcs: list[str] = knob(
        [], "`gold`, file.py:function (your file is run as code), or reward-model folders"
    )
    reward_weights: list[float] = knob([], "one per reward function (empty: 1 each)")
    missing_eos_penalty: float = knob(-1.0, "reward of a completion that did not stop")
    penalize_missing_eos: bool = knob(True, "false: such a completion keeps its own reward")
    overlong_buffer: int = knob(
        0, "tokens before max_completion_length over which the reward falls by up to 1 (0: none)"
    )

    # --- selection and advantages ---
    rejection_method: str = knob("rso", "how candidates are kept", REJECTION_METHODS)
    rejection_temperature: float = knob(0.5, "of rejection sampling, in units of reward")
    distinct_candidates: bool = knob(
        False, "rso and gumbel draw from a set of texts, as RSO's paper does, not from all samples"
    )
    baseline: str = knob("all", "mean over all candidates or the kept ones", ["all", "kept"])
    advantage_baseline: str = knob(
        "mean", "subtract the mean of the group, or of the other completions (RLOO)", BASELINES
    )
    scale_rewards: str = knob(
        "group", "divide by the standard deviation of the group, of the batch, or by none", SCALES
    )
    normalize_globally: bool = knob(False, "normalise kept advantages again, over all ranks")
    zero_variance: str = knob(
        "keep",
        "groups of equal rewards: keep; drop from batch and denominators; resample: put fresh "
        "prompts in their place, and drop those that are left",
        ["keep", "drop", "resample"],
    )
    max_resamples: int = knob(4, "rounds of fresh prompts in a step with zero_variance resample")
    mask_truncated_completions: bool = knob(
        False, "completions that did not stop leave loss and denominators, not the baseline"
    )

    # --- objective ---
    num_iterations: int = knob(1, "passes over the completions of a rollout")
    num_minibatches: int = knob(1, "updates in a pass, each on its share of the prompts")
    policy_objective: str = knob(
        "clip",
        "clip: no gradient outside of the bounds; cispo: a bounded weight",
        POLICY_OBJECTIVES,
    )
    ratio_level: str = knob("token", "ratio of a token, or of the sequence (GSPO)", RATIO_LEVELS)
    epsilon_low: float = knob(0.2, "the ratio is clipped below 1 - epsilon_low")
    epsilon_high: float = knob(0.2, "the ratio is clipped above 1 + epsilon_high")
    delta: float = knob(0.0, "bound on the ratio where the advantage is negative (0: none)")
    aggregation: str = knob(
        "grpo",
        "grpo: mean per completion, then over completions; token: over all tokens (DAPO); "
        "constant: sum / max_completion_length (Dr. GRPO); prompt: mean per prompt, then over them",
        AGGREGATIONS,
    )
    entropy_coef: float = knob(0.0, "weight of the entropy of each token, which is subtracted")
    sampler_correction: str = knob(
        "none", "weigh by trainer / sampler probability, truncated or masked", SAMPLER_CORRECTIONS
    )
    sampler_correction_cap: float = knob(2.0, "largest weight; with a mask 1 / cap is the smallest")

    # --- tie to the reference ---
    beta: float = knob(0.04, "weight of the KL to the reference, per nat (0: no reference)")
    kl_estimator: str = knob(
        "k3", "of the KL at each token; full: exact, over the vocabulary", (*KL_ESTIMATORS, "full")
    )
    kl_in: str = knob(
        "loss", "add beta KL to the loss, or subtract it from the reward", ["loss", "reward"]
    )
    kl_correction: bool = knob(
        False, "multiply the estimate by the ratio: its gradient is then that of the KL"
    )
    ref_model_name_or_path: str = knob("", "frozen reference (empty: model_name_or_path)")
    ref_update_steps: int = knob(0, "steps between updates of the reference (0: none)")
    ref_mixup_alpha: float = knob(1.0, "share of the policy in the updated reference (1: a copy)")

    def __post_init__(self) -> None:
        """Refuse values that no GRPO run may have."""
        super().__post_init__()
        require_finite(self, "missing_eos_penalty")
        if self.eval_steps:
            raise UserError(
                f"--eval_steps is {self.eval_steps}; it must be 0 in GRPO, whose rows have no "
                "completions to evaluate on; --sample_steps shows samples on the way."
            )
        if not self.require_stop_token:
            raise UserError(
                "--require_stop_token is false; it must be true in GRPO, which asks for none; "
                "--penalize_missing_eos false is for completions that are cut by design."
            )
        self.num_candidates = self.num_candidates or self.num_generations
        if self.num_generations < 2 or self.num_candidates < self.num_generations:
            raise UserError(
                f"--num_generations is {self.num_generations} of {self.num_candidates} candidates; "
                "it must be at least 2 and at most --num_candidates."
            )
        for name in (
            "temperature",
            "rejection_temperature",
            "num_iterations",
            "num_minibatches",
            "max_resamples",
            "ref_mixup_alpha",
        ):
            require_positive(self, name)
        for name in (
            "epsilon_low",
            "epsilon_high",
            "delta",
            "beta",
            "top_k",
            "entropy_coef",
            "overlong_buffer",
            "ref_update_steps",
        ):
            require_not_negative(self, name)
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not self.reward_funcs:
            raise UserError("--reward_funcs is required: gold, file.py:function, or model folders.")
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path
        refuse_objective(self)
        refuse_sampling(self)
        refuse_reference(self)

    @property
    def num_updates(self) -> int:
        """Optimiser steps per rollout."""
        return self.num_iterations * self.num_minibatches

    @property
    def has_exact_kl(self) -> bool:
        """Whether the KL is computed over the vocabulary."""
        return self.beta > 0 and self.kl_estimator == "full"


def refuse_objective(config: GRPOConfig) -> None:
    """Raise a UserError for a policy objective that contradicts itself."""
    if config.delta and config.policy_objective != "clip":
        raise UserError(f"--delta is {config.delta}; it must be 0 with --policy_objective cispo.")
    if config.delta and config.delta <= 1 + config.epsilon_high:
        raise UserError(
            f"--delta is {config.delta}; it must be 0 or above 1 + epsilon_high, "
            f"{1 + config.epsilon_high:g}."
        )
    if config.num_minibatches > config.batch_size:
        raise UserError(
            f"--num_minibatches is {config.num_minibatches}; it must be at most --batch_size, "
            f"{config.batch_size}."
        )


def refuse_sampling(config: GRPOConfig) -> None:
    """Raise a UserError for settings of sampling, lengths and correction that do not fit."""
    is_restricted = config.top_p < 1 or config.top_k > 0
    if config.sampler_correction != "none" and is_restricted:
        raise UserError(
            f"--sampler_correction is {config.sampler_correction}; it must be none with --top_p "
            "below 1 or --top_k above 0, where sampler and trainer have different supports."
        )
    if not config.sampler_correction_cap >= 1:  # NaN compares as False
        raise UserError(
            f"--sampler_correction_cap is {config.sampler_correction_cap}; it must be 1 or more."
        )
    is_drawn = config.num_candidates > config.num_generations
    if config.distinct_candidates and (config.rejection_method == "max_variance" or not is_drawn):
        raise UserError(
            "--distinct_candidates is true; it must be false with --rejection_method max_variance "
            "and where --num_candidates is --num_generations: nothing is drawn."
        )
    if config.overlong_buffer >= config.max_completion_length:
        raise UserError(
            f"--overlong_buffer is {config.overlong_buffer}; it must be below "
            f"--max_completion_length, {config.max_completion_length}."
        )


def refuse_reference(config: GRPOConfig) -> None:
    """Raise a UserError for a KL term or an update of the reference that does not fit."""
    if config.ref_mixup_alpha > 1:
        raise UserError(f"--ref_mixup_alpha is {config.ref_mixup_alpha}; it must be at most 1.")
    if config.lora_r and config.ref_update_steps:
        refuse_adapter_update(config)
    if config.beta == 0:
        refuse_unused_reference(config)
        return
    if config.kl_in == "reward":
        refuse_kl_in_reward(config)
    elif config.kl_estimator == "k1" and not config.kl_correction:
        raise UserError(
            "--kl_estimator is k1, whose expected gradient is 0 as a loss; use k2, k3 or full, or "
            "--kl_correction true, or --kl_in reward."
        )
    if config.kl_correction and config.kl_estimator not in ("k1", "k3"):
        raise UserError(
            f"--kl_correction is true; it must be false with --kl_estimator {config.kl_estimator}: "
            "full is exact without it, and k2 times the ratio has another gradient than the KL."
        )


def refuse_unused_reference(config: GRPOConfig) -> None:
    """Raise a UserError for what --beta 0, which has no reference, would ignore."""
    if config.ref_update_steps:
        raise UserError(
            f"--ref_update_steps is {config.ref_update_steps}; it must be 0 with --beta 0, which "
            "has no reference."
        )
    if config.ref_model_name_or_path != config.model_name_or_path:
        raise UserError(
            f"--ref_model_name_or_path is {config.ref_model_name_or_path}; it must not be given "
            "with --beta 0, which has no reference."
        )
    for name in ("kl_estimator", "kl_in", "kl_correction"):
        value, default = getattr(config, name), getattr(type(config), name)
        if value != default:
            raise UserError(
                f"--{name} is {str(value).lower()}; it must be {str(default).lower()} with --beta "
                "0, which has no KL."
            )


def refuse_adapter_update(config: GRPOConfig) -> None:
    """Raise a UserError for a reference that cannot take the policy's adapters."""
    if config.ref_mixup_alpha != 1:
        raise UserError(
            f"--ref_mixup_alpha is {config.ref_mixup_alpha}; it must be 1 with --lora_r: a mixture "
            "of two adapters has a higher rank."
        )
    if config.ref_model_name_or_path != config.model_name_or_path:
        raise UserError(
            f"--ref_model_name_or_path is {config.ref_model_name_or_path}; with --lora_r and "
            "--ref_update_steps it must be --model_name_or_path, whose adapters move."
        )


def refuse_kl_in_reward(config: GRPOConfig) -> None:
    """Raise a UserError for what a KL in the reward excludes."""
    if config.kl_estimator != "k1" or config.kl_correction:
        raise UserError(
            f"--kl_estimator is {config.kl_estimator} and --kl_correction {config.kl_correction}; "
            "with --kl_in reward they must be k1 and false."
        )
    if config.zero_variance != "keep":
        raise UserError(
            f"--zero_variance is {config.zero_variance}; it must be keep with --kl_in reward: "
            "completions of equal rewards still differ in their KL."
        )
    if config.baseline == "all" and config.num_candidates > config.num_generations:
        raise UserError(
            "--baseline is all; with --kl_in reward it must be kept, since only kept completions "
            "are scored by the reference."
        )
    if config.mask_truncated_completions:
        raise UserError(
            "--mask_truncated_completions is true; it must be false with --kl_in reward, since "
            "masked completions are not scored by the reference."
        )
