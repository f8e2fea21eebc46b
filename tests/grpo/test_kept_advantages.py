"""Claim: after rejection sampling, advantages are against the baseline that the flag names.

Worked by hand on a prompt with four candidates, of which the better two are kept. Against all four
both may be above the mean; against each other one is as far above as the other is below.
"""

from typing import Any

import pytest
import torch

from common.grpo import minibatches, rollouts
from common.grpo.config import GRPOConfig
from common.grpo.rollouts import Groups
from common.sampling.sampler import Rollouts

REWARDS = [[0.0, 1.0, 2.0, 9.0]]  # mean 3; of the kept 5.5
KEPT = torch.tensor([[3, 2]])
BY_BASELINE = {
    ("all", "none"): [6.0, -1.0],
    ("kept", "none"): [3.5, -3.5],
    ("all", "group"): [6.0 / (50 / 3) ** 0.5, -1.0 / (50 / 3) ** 0.5],  # 9 + 4 + 1 + 36 over 3
    ("kept", "group"): [3.5 / 24.5**0.5, -3.5 / 24.5**0.5],
}


def new_config(**flags: Any) -> GRPOConfig:
    needed = {
        "output_dir": "unused",
        "model_name_or_path": "unused",
        "num_candidates": 4,
        "num_generations": 2,
        "reward_funcs": ["gold"],
    }
    return GRPOConfig(**(needed | flags))


def new_groups(rewards: list[list[float]]) -> Groups:
    values = torch.tensor(rewards)
    real = torch.ones(len(rewards), dtype=torch.bool)
    drawn = Rollouts.of([[1]] * values.numel(), [[0.0]] * values.numel(), [True] * values.numel())
    return Groups([], real, drawn, values, {"f": values})


@pytest.mark.parametrize(("baseline", "scale"), BY_BASELINE)
def test_the_baseline_is_the_mean_of_the_set_that_the_flag_names(baseline: str, scale: str):
    config = new_config(baseline=baseline, scale_rewards=scale, beta=0.0)
    kept = rollouts.select_rows(new_groups(REWARDS), KEPT, config)
    advantages = minibatches.advantages(kept, None, config)
    expected = torch.tensor([BY_BASELINE[baseline, scale]])
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("baseline", "expected"), [("all", [False, True]), ("kept", [True, True])])
def test_a_group_is_flat_if_the_rewards_behind_its_baseline_are_equal(baseline, expected):
    groups = new_groups([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    kept = torch.tensor([[1, 3], [0, 1]])
    assert (
        rollouts.select_rows(groups, kept, new_config(baseline=baseline)).flat.tolist() == expected
    )
