"""The configuration of DPO: its flags, and the losses that they name."""

from dataclasses import dataclass
from typing import ClassVar

from common.config.flags import CompletionFlags, FrozenFlags, SampleTableFlags, flag, path_flag
from common.config.stages import SamplingConfig, TrainConfig
from common.objectives.kinds import PreferenceLoss


@dataclass
class DPOConfig(FrozenFlags, SampleTableFlags, CompletionFlags, TrainConfig, SamplingConfig):
    """Rows have the columns `chosen` and `rejected`, and `prompt` unless both share theirs."""

    stage: ClassVar = "DPO"
    objective_kinds: ClassVar = (PreferenceLoss,)

    _objective: ClassVar = "objective"
    loss_type: list[str] = path_flag(
        ["sigmoid"],
        "losses: one or several files of common/objectives/preference, or file.py:function (your "
        "file is run as code), each with settings behind a colon, as sigmoid:label_smoothing=0.1",
        required=True,
    )
    loss_weights: list[float] = flag([], "weights, one per loss_type (empty: 1 each)", gt=0)
    beta: float = flag(
        0.1, "strength of the pull to the reference, per nat; scale of implicit rewards", gt=0
    )

    _reference: ClassVar = "reference"
    reference_free: bool = flag(False, "take every completion as equally likely in the reference")
    ref_model_name_or_path: str = path_flag("", "frozen reference (empty: model_name_or_path)")

    def __post_init__(self) -> None:
        """Refuse values that no DPO run may have."""
        super().__post_init__()
        if self.loss_weights and len(self.loss_weights) != len(self.loss_type):
            raise self.refused("loss_weights", "empty, or one number for each --loss_type")

    def find_objective(self) -> PreferenceLoss:
        """The losses that `loss_type` names, with their settings; runs a user's files."""
        objective = PreferenceLoss.find(*self.loss_type)
        objective.refuse_values(self.beta)
        return objective
