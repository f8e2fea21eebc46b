"""The configuration of DPO: its losses, its reference, where its pairs come from."""

from dataclasses import dataclass

from common.config import (
    UserError,
    knob,
    require_finite,
    require_not_negative,
    require_positive,
    require_within,
)
from common.losses import (
    PER_TOKEN_LOSSES,
    PREFERENCE_LOSSES,
    REFERENCE_FREE_LOSSES,
    SMOOTHED_LOSSES,
)
from common.model.lora import LoraTrainConfig
from common.pairs.groups import PAIR_METHODS


@dataclass
class DPOConfig(LoraTrainConfig):
    """Rows have the columns `prompt`, `chosen` and `rejected`; for rollouts `prompt` will do."""

    # --- objective ---
    loss_type: list[str] = knob(["sigmoid"], "one or several losses", PREFERENCE_LOSSES)
    loss_weights: list[float] = knob([], "one per loss_type (empty: 1 each)")
    beta: float = knob(0.1, "strength of the pull to the reference, per nat; simpo: reward scale")
    label_smoothing: float = knob(0.0, "assumed share of wrongly labelled pairs")
    gamma: float = knob(0.0, "simpo: margin by which the chosen reward should be the higher")
    ld_alpha: float = knob(1.0, "weight of tokens beyond the length of the shorter completion")
    sft_weight: float = knob(0.0, "weight of the chosen completion's mean negative log-likelihood")

    # --- reference ---
    reference_free: bool = knob(False, "take every completion as equally likely in the reference")
    ref_model_name_or_path: str = knob("", "frozen reference (empty: model_name_or_path)")
    precompute_ref_log_probs: bool = knob(
        True, "score all pairs with the reference first and free it (false: beside each step)"
    )
    ref_cache_dir: str = knob(
        "", "folder where runs keep and find the reference's log-probabilities (empty: none)"
    )

    # --- pairs ---
    pairs_from: str = knob(
        "dataset", "dataset: its columns; rollouts: of the starting policy", ["dataset", "rollouts"]
    )
    pair_method: str = knob(
        "rso_tournament",
        "rso_tournament: random pairs of what rejection sampling accepts; best_worst: one pair; "
        "all: every pair",
        PAIR_METHODS,
    )
    num_candidates: int = knob(8, "completions sampled per prompt")
    num_generations: int = knob(4, "rso_tournament: candidates accepted, twice the pairs; even")
    rejection_temperature: float = knob(0.5, "of rejection sampling, in units of reward")
    temperature: float = knob(1.0, "of sampling")
    reward_funcs: list[str] = knob(
        [], "`gold`, file.py:function (your file is run as code), or reward-model folders"
    )
    reward_weights: list[float] = knob([], "one per reward function (empty: 1 each)")
    missing_eos_penalty: float = knob(-1.0, "reward of a completion that did not stop")
    penalize_missing_eos: bool = knob(True, "false: such a completion keeps its own reward")

    def __post_init__(self) -> None:
        """Refuse values that no DPO run may have."""
        super().__post_init__()
        require_positive(self, "beta")
        require_within(self, "label_smoothing", 0, 0.5)
        for name in ("sft_weight", "gamma"):
            require_not_negative(self, name)
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path
        refuse_contradictions(self)
        refuse_unused_reference(self)
        if self.pairs_from == "rollouts":
            refuse_impossible_rollouts(self)
        elif self.reward_funcs:
            raise UserError("--reward_funcs is for --pairs_from rollouts; pairs have their labels.")

    @property
    def weighted_losses(self) -> list[tuple[str, float]]:
        """Each loss with its weight."""
        return list(
            zip(self.loss_type, self.loss_weights or [1.0] * len(self.loss_type), strict=True)
        )

    @property
    def needs_reference(self) -> bool:
        """Whether any loss compares with the reference."""
        return not self.reference_free and not set(self.loss_type) <= set(REFERENCE_FREE_LOSSES)

    @property
    def is_per_token(self) -> bool:
        """Whether implicit rewards are per token: then the losses are, and not only some."""
        return set(self.loss_type) <= set(PER_TOKEN_LOSSES)


def refuse_unused_reference(config: DPOConfig) -> None:
    """Raise a UserError for a reference that no loss would be compared with."""
    if config.needs_reference or config.ref_model_name_or_path == config.model_name_or_path:
        return
    losses = f"--loss_type {', '.join(config.loss_type)}"
    cause = "--reference_free true" if config.reference_free else losses
    raise UserError(
        f"--ref_model_name_or_path is {config.ref_model_name_or_path}; it must not be given with "
        f"{cause}, which has no reference."
    )


def refuse_contradictions(config: DPOConfig) -> None:
    """Raise a UserError for options of the objective that do not go together."""
    names = ", ".join(config.loss_type)
    unsmoothed = [name for name in config.loss_type if name not in SMOOTHED_LOSSES]
    per_token = [name for name in config.loss_type if name in PER_TOKEN_LOSSES]
    if not config.loss_type:
        raise UserError(f"--loss_type is empty; give one or several of {PREFERENCE_LOSSES}.")
    if config.loss_weights and len(config.loss_weights) != len(config.loss_type):
        raise UserError(
            f"--loss_weights has {len(config.loss_weights)} values for {len(config.loss_type)} "
            "losses; give one per --loss_type, or none."
        )
    if not all(0 < weight < float("inf") for weight in config.loss_weights):
        raise UserError(f"--loss_weights is {config.loss_weights}; they must be positive.")
    if config.label_smoothing and unsmoothed:
        raise UserError(
            f"--label_smoothing is {config.label_smoothing}; it must be 0 with --loss_type "
            f"{unsmoothed[0]}, which has no labels to smooth."
        )
    if config.gamma and "simpo" not in config.loss_type:
        raise UserError(f"--gamma is {config.gamma}; it must be 0 with --loss_type {names}.")
    if not 0 <= config.ld_alpha <= 1:
        raise UserError(f"--ld_alpha is {config.ld_alpha}; it must lie in [0, 1].")
    if config.ld_alpha < 1 and per_token:
        raise UserError(
            f"--ld_alpha is {config.ld_alpha}; it must be 1 with --loss_type {per_token[0]}, which "
            "divides by the length instead."
        )


def refuse_impossible_rollouts(config: DPOConfig) -> None:
    """Raise a UserError for rollouts that give no pairs."""
    for name in ("temperature", "rejection_temperature"):
        require_positive(config, name)
    require_finite(config, "missing_eos_penalty")
    if not config.reward_funcs:
        raise UserError("--reward_funcs is required: gold, file.py:function, or model folders.")
    num_accepted = config.num_generations if config.pair_method == "rso_tournament" else 2
    if not 2 <= num_accepted <= config.num_candidates or num_accepted % 2:
        raise UserError(
            f"--num_generations is {config.num_generations} of {config.num_candidates} candidates; "
            "it must be even, at least 2 and at most --num_candidates."
        )
