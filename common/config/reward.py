"""The configuration of reward models."""

from dataclasses import dataclass
from typing import ClassVar

from common.config.flags import CompletionFlags, flag, path_flag
from common.config.stages import TrainConfig
from common.noise import HEAD_STDS


@dataclass
class RewardConfig(CompletionFlags, TrainConfig):
    """Rows have the columns `prompt`, `chosen` and `rejected`."""

    stage: ClassVar = "reward model"

    _reward: ClassVar = "reward model"
    head_init: str = flag(
        "stiennon",
        "weights of the new head: a variance of 1/(d+1); openrlhf: a std of 1/(d+1); transformers: "
        "a std of 0.02; zeros",
        [*HEAD_STDS],
    )
    center_rewards_coefficient: float = flag(
        0.0, "weight of the square of a pair's summed rewards, which keeps them near 0", ge=0
    )
    margin_column: str = flag(
        "", "column by which the chosen reward should be the higher (empty: no margin)"
    )
    sft_dataset_name: str = path_flag(
        "", "rows with `prompt` and `completion` whose mean reward becomes 0 (empty: no shift)"
    )
    num_sft_rows: int = flag(512, "rows of sft_dataset_name's training split that are scored", gt=0)
