"""The first steps of every stage are those of `tests/golden`: no commit moves a number unseen.

About `train_sft`, `train_reward`, `train_dpo` and `train_grpo`.
"""

import pytest
from trajectories import CASES, Change, changes, label

NAMES = [label(stage, flags) for stage, cases in CASES.items() for flags in cases]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Change]:
    return changes([*CASES], tmp_path_factory.mktemp("golden"))


def test_every_case_has_a_golden_trajectory(compared: dict[str, Change]) -> None:
    assert [*compared] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_first_steps_are_the_golden_ones(compared: dict[str, Change], name: str) -> None:
    share, where = compared[name]
    assert share <= 1, f"{where}; meant? record anew: python -m tests.trajectories"
