"""The configuration of DPO: its flags, and the losses that they name."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from common.config.flags import (
    OBJECTIVE_ARGS,
    CompletionFlags,
    FrozenFlags,
    SampleTableFlags,
    flag,
    path_flag,
)
from common.config.stages import SamplingConfig, TrainConfig
from common.objectives.implicit_reward import ImplicitReward

if TYPE_CHECKING:
    from common.objectives.kinds import PreferenceLoss


@dataclass
class DPOConfig(FrozenFlags, SampleTableFlags, CompletionFlags, TrainConfig, SamplingConfig):
    """Rows have the columns `chosen` and `rejected`, and `prompt` unless both share theirs."""

    stage: ClassVar = "DPO"

    _objective: ClassVar = "objective"
    loss_type: list[str] = path_flag(
        ["sigmoid"],
        "one or several files of common/objectives/preference, or file.py:function (your file is "
        "run as code)",
        required=True,
    )
    loss_weights: list[float] = flag([], "one per loss_type (empty: 1 each)", gt=0)
    beta: float = flag(
        0.1, "strength of the pull to the reference, per nat; scale of implicit rewards", gt=0
    )
    label_smoothing: float = flag(0.0, "assumed share of wrongly labelled pairs", ge=0, lt=0.5)
    objective_args: list[str] = flag([], OBJECTIVE_ARGS)

    _reference: ClassVar = "reference"
    reference_free: bool = flag(False, "take every completion as equally likely in the reference")
    ref_model_name_or_path: str = path_flag("", "frozen reference (empty: model_name_or_path)")

    def __post_init__(self) -> None:
        """Refuse values that no DPO run may have."""
        from common.objectives.find import as_arguments

        super().__post_init__()
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.model_name_or_path
        if self.loss_weights and len(self.loss_weights) != len(self.loss_type):
            raise self.refused("loss_weights", "empty, or one number for each --loss_type")
        objective = self.objective
        settings = {n: value for n, value in objective.settings.items() if n not in objective.flags}
        self.objective_args = as_arguments(settings)

    @staticmethod
    def objective_kinds() -> "list[type[PreferenceLoss]]":
        """The kinds of objectives of this stage."""
        from common.objectives.kinds import PreferenceLoss

        return [PreferenceLoss]

    @property
    def implicit_reward(self) -> ImplicitReward:
        """The reward by which pairs are judged."""
        objective = self.objective
        needs_reference = objective.needs_reference and not self.reference_free
        return ImplicitReward(self.beta, needs_reference, objective.is_per_token)

    @property
    def objective(self) -> "PreferenceLoss":
        """The losses with their settings: flags replace the defaults of their files."""
        from common.objectives.kinds import PreferenceLoss

        settings: dict[str, Any] = {"beta": self.beta}
        losses = [PreferenceLoss.function_of(name) for name in self.loss_type]
        if self.label_smoothing or any("label_smoothing" in loss.settings for loss in losses):
            settings["label_smoothing"] = self.label_smoothing
        return PreferenceLoss.find(self.loss_type, self.objective_args, **settings)
