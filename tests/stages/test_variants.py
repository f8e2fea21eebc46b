"""Claim: `python -m tests.variants` leaves no objective flag out, and sees what differs.

Every field of a stage's own configuration takes another value than its default in some variant, and
each of its choices is taken; the comparison of two runs counts flipped completions, and measures
losses and weights, by hand. About `tests/variants.py`.
"""

from dataclasses import fields
from typing import Any

import pytest
import torch
from ranks import STAGES

from common.config.engine import EngineConfig
from common.config.flags import CompletionFlags, FrozenFlags, SampleTableFlags
from common.config.stages import TrainConfig
from experiments.runs.stages import config_class
from tests.variants import OF_STAGE, VARIANTS, Run, compare, label, largest_difference, row

GROUPS = (TrainConfig, EngineConfig, SampleTableFlags, CompletionFlags, FrozenFlags)
SHARED = {f.name for group in GROUPS for f in fields(group)}
OWN = [(stage, f) for stage in STAGES for f in fields(config_class(f"train_{stage}"))]
OWN = [(stage, f) for stage, f in OWN if f.name not in SHARED]


def values_of(stage: str, name: str) -> list[Any]:
    """Values of a field in the variants of a stage, the items of lists one by one."""
    values = [(OF_STAGE[stage] | flags).get(name) for flags in VARIANTS[stage]]
    lists = [value if isinstance(value, list) else [value] for value in values if value is not None]
    return [item for items in lists for item in items]


@pytest.mark.parametrize(("stage", "field"), OWN, ids=lambda value: getattr(value, "name", value))
def test_every_objective_flag_is_tried(stage: str, field: Any):
    tried = values_of(stage, field.name)
    assert any(value != field.default for value in tried)
    usual = field.default if isinstance(field.default, str) else None
    if usual is None and field.metadata.get("choices"):
        usual = field.default_factory()[0]
    for choice in field.metadata["choices"] or []:
        assert choice in tried or choice == usual, choice


def test_every_stage_has_variants_and_none_is_there_twice():
    assert VARIANTS.keys() == STAGES.keys()
    for stage, variants in VARIANTS.items():
        assert len({label(stage, flags) for flags in variants}) == len(variants)


def new_run(losses: list[float], weights: list[float], rollouts: Any, heard: int = 0) -> Run:
    lines = [{"step": i + 1, "loss": loss, "grad_norm": 2.0} for i, loss in enumerate(losses)]
    tensors = {"a": torch.tensor(weights[:1]), "b": torch.tensor(weights[1:])}
    return Run([*lines, {"step": 9, "eval_loss": 5.0}], tensors, rollouts, ["w"] * heard)


def test_two_runs_are_compared_by_hand():
    completions = {
        "step 0, row 4": [[1, 2], [3]],
        "step 1, row 2": [[5], [6]],
        "step 10, row 4": [[7], [8]],
        "step 12, row 0": [[1], [2]],
    }
    one = new_run([1.0, -0.5, 1e-9], [3.0, 4.0], completions)
    flipped = completions | {"step 10, row 4": [[7], [9]], "step 1, row 2": [[5], [6, 6]]}
    flipped["step 3, row 0"] = [[1], [1]]  # filler that only the other run has
    del flipped["step 12, row 0"]  # of a prompt that it lost all completions differ
    other = new_run([1.01, -0.6, 1e-4], [3.0, 4.5], flipped, heard=2)
    comparison = compare(one, other)
    assert comparison.loss == pytest.approx(0.2)  # the third: 1e-4 against 0.01, not against 1e-9
    assert comparison.grad_norm == 0
    assert comparison.weights == pytest.approx(0.1)  # 0.5 of a norm of 5
    assert (comparison.num_drawn, comparison.num_other, comparison.first_step) == (8, 4, 1)
    assert comparison.loss_before == pytest.approx(0.01)  # of the first step only
    line = row("name", 2, one, other)
    assert line.startswith("| name | 1, 2 | 2.0e-01 | 0.0e+00 | 1.0e-01 | 4 of 8, from step 2")
    assert line.endswith("(before: 1.0e-02) | 2 |")
    assert largest_difference(one, one, "loss") == 0
