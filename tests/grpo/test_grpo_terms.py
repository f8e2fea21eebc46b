"""Claim: where all rewards are equal, GRPO's loss is beta times the KL, minus the entropy's share.

Whole runs of the stage: advantages are 0, so what it records as its loss has to be what its other
metrics say of KL and entropy, with the right sign and weight.
"""

from typing import Any

import pytest
from ranks import SHORT_RUN, launch, run_stages

from common.record.jsonl import read_jsonl

REWARD_FILE = """
def same(prompts, completions, completion_ids, **columns):
    return [1.0] * len(prompts)
"""
LENGTH = 8
FLAGS = SHORT_RUN | {
    "dataset_test_split": "",
    "num_train_rows": 8,
    "max_completion_length": LENGTH,
    "num_generations": 2,
    "missing_eos_penalty": 1.0,  # the same as those that stop
    "learning_rate": 3e-3,
    "max_steps": 3,
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, start_flags: dict[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The lines of a run with an entropy bonus, and of one tied to what that run ended with."""
    folder = tmp_path_factory.mktemp("terms")
    (folder / "rewards.py").write_text(REWARD_FILE)
    start = FLAGS | start_flags | {"reward_funcs": f"{folder}/rewards.py:same"}
    of_run = {
        "entropy": {"beta": 0.0, "entropy_coef": 0.5, "aggregation": "token"},
        "kl": {
            "beta": 0.4,
            "ref_model_name_or_path": str(folder / "entropy" / "model"),
            "aggregation": "constant",
        },
    }
    jobs = [
        {"stage": "grpo", "flags": start | flags | {"output_dir": str(folder / name)}}
        for name, flags in of_run.items()
    ]
    launch(run_stages, 1, folder, jobs=jobs)
    return {name: read_jsonl(folder / name / "metrics.jsonl") for name in of_run}


def test_the_entropy_bonus_lowers_the_loss_by_its_coefficient(runs):
    assert len(runs["entropy"]) == FLAGS["max_steps"]
    for line in runs["entropy"]:  # means over tokens, both
        assert line["loss"] == pytest.approx(-0.5 * line["entropy"], rel=1e-4)
    assert runs["entropy"][0]["entropy"] > 1


def test_the_kl_raises_the_loss_by_beta(runs):
    assert len(runs["kl"]) == FLAGS["max_steps"]
    for line in runs["kl"]:  # nats per completion, and the loss per token of the longest
        assert line["loss"] == pytest.approx(0.4 * line["kl"] / LENGTH, rel=1e-4)
    assert runs["kl"][0]["kl"] > 1e-3
