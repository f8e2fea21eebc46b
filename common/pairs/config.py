"""The configuration of DPO: one flag per variant, and which of them exclude each other."""

from dataclasses import dataclass
from typing import ClassVar

from common.config.flags import (
    SMALLEST_TEMPERATURE,
    CompletionFlags,
    FrozenFlags,
    SampleTableFlags,
    flag,
    path_flag,
)
from common.config.stages import RowsConfig, TrainConfig
from common.errors import UserError
from common.evaluation.pair_scores import ImplicitReward
from common.losses import PREFERENCE_LOSSES, SMOOTHED_LOSSES
from common.sampling.vllm.config import EngineConfig

PAIR_METHODS = ("rso_tournament", "best_worst", "all")


@dataclass
class RolloutPairConfig(FrozenFlags, RowsConfig, EngineConfig):
    """The flags of sampling preference pairs from a policy."""

    _pairs: ClassVar = "pairs"
    pair_method: str = flag(
        "rso_tournament",
        "rso_tournament: random pairs of what rejection sampling accepts; best_worst: one pair; "
        "all: every pair",
        PAIR_METHODS,
    )
    num_candidates: int = flag(8, "completions sampled per prompt")
    num_generations: int = flag(4, "rso_tournament: candidates accepted, twice the pairs; even")
    rejection_temperature: float = flag(
        0.5, "of rejection sampling, in units of reward", ge=SMALLEST_TEMPERATURE
    )
    temperature: float = flag(1.0, "of sampling", ge=SMALLEST_TEMPERATURE)
    reward_funcs: list[str] = path_flag(
        [], "as in train_grpo.py: built-ins, file.py:function (your file is run as code), folders"
    )
    reward_weights: list[float] = flag([], "one per reward function (empty: 1 each)")
    missing_eos_penalty: float = flag(-1.0, "reward of a completion that did not stop")
    penalize_missing_eos: bool = flag(True, "false: such a completion keeps its own reward")


@dataclass
class DPOConfig(RolloutPairConfig, SampleTableFlags, CompletionFlags, TrainConfig):
    """Rows have the columns `prompt`, `chosen` and `rejected`; for rollouts `prompt` will do."""

    stage: ClassVar = "DPO"
    eval_metrics: ClassVar = ("eval_accuracy", "eval_loss", "eval_reward_margin")

    _objective: ClassVar = "objective"
    loss_type: list[str] = flag(
        ["sigmoid"], "one or several losses", PREFERENCE_LOSSES, required=True
    )
    loss_weights: list[float] = flag([], "one per loss_type (empty: 1 each)", gt=0)
    beta: float = flag(
        0.1, "strength of the pull to the reference, per nat; simpo: reward scale", gt=0
    )
    label_smoothing: float = flag(0.0, "assumed share of wrongly labelled pairs", ge=0, lt=0.5)
    gamma: float = flag(0.0, "simpo: margin by which the chosen reward should be the higher", ge=0)
    sft_weight: float = flag(
        0.0, "weight of the chosen completion's mean negative log-likelihood", ge=0
    )

    _reference: ClassVar = "reference"
    reference_free: bool = flag(False, "take every completion as equally likely in the reference")
    ref_model_name_or_path: str = path_flag("", "frozen reference (empty: model_name_or_path)")

    _pairs: ClassVar = "pairs"
    pairs_from: str = flag(
        "dataset", "dataset: its columns; rollouts: of the starting policy", ["dataset", "rollouts"]
    )

    def __post_init__(self) -> None:
        """Refuse values that no DPO run may have."""
        super().__post_init__()
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path
        refuse_losses(self)
        if self.pairs_from == "rollouts":
            refuse_rollouts(self)
        elif self.reward_funcs:
            raise self.refused("reward_funcs", "empty without --pairs_from rollouts")

    @property
    def implicit_reward(self) -> ImplicitReward:
        """What pairs are judged by."""
        return ImplicitReward(self.loss_type, self.beta, self.reference_free)

    @property
    def needs_reference(self) -> bool:
        """Whether any loss compares with the reference."""
        return self.implicit_reward.needs_reference


def refuse_losses(config: DPOConfig) -> None:
    """Raise a UserError for options of the objective that do not go together."""
    unsmoothed = [name for name in config.loss_type if name not in SMOOTHED_LOSSES]
    if config.loss_weights and len(config.loss_weights) != len(config.loss_type):
        raise config.refused("loss_weights", "empty, or one number for each --loss_type")
    if config.label_smoothing and unsmoothed:
        where = f"with --loss_type {unsmoothed[0]}, which has no labels to smooth"
        raise config.refused("label_smoothing", f"0 {where}")
    if config.gamma and "simpo" not in config.loss_type:
        raise config.refused("gamma", "0 without --loss_type simpo")


def refuse_rollouts(config: RolloutPairConfig) -> None:
    """Raise a UserError for rollouts that give no pairs."""
    if not config.reward_funcs:
        raise UserError("--reward_funcs is required: gold, file.py:function, or model folders.")
    num_accepted = config.num_generations if config.pair_method == "rso_tournament" else 2
    if not 2 <= num_accepted <= config.num_candidates or num_accepted % 2:
        most = f"at most --num_candidates, {config.num_candidates}"
        raise config.refused("num_generations", f"even, at least 2 and {most}")
