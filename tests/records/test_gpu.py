"""Claim: a run's folder becomes the JSON of a measurement, and one without a GPU is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import UserError
from experiments.records import gpu


def run_folder(folder: Path, **environment: Any) -> Path:
    """A run of five steps, the first two of them slow."""
    found = {"gpu": "NVIDIA H100 80GB HBM3", "num_gpus": 8, "world_size": 8}
    found |= {"compute_dtype": "bfloat16", "git_commit": "abc", "packages": {"torch": "2.13.0"}}
    found |= {"script": "train_sft.py", "started": "2026-11-26 14:45 UTC"} | environment
    (folder / "environment.json").write_text(json.dumps(found))
    flags = {"model_name_or_path": "output/demo/sft/model", "batch_size": 4}
    (folder / "config.yaml").write_text(yaml.safe_dump(flags))
    lines = [
        {"step": i + 1, "step_seconds": seconds, "peak_memory_gb": 7.0 + i}
        for i, seconds in enumerate((9.0, 5.0, 0.3, 0.1, 0.2))
    ]
    lines.append({"step": 5, "eval_loss": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_medians_are_those_of_the_later_steps(tmp_path: Path):
    record = gpu.measured(run_folder(tmp_path), skip=2)
    assert (record["step_seconds"], record["num_steps"]) == (0.2, 3)
    assert record["peak_memory_gb"] == 11.0
    assert record["flags"]["batch_size"] == 4
    assert gpu.file_name(record) == "nvidia-h100-80gb-hbm3-x8-sft-sft-model.json"


def test_a_run_without_a_gpu_or_without_steps_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="logged no step after the first 5"):
        gpu.measured(run_folder(tmp_path), skip=5)
    with pytest.raises(UserError, match="did not run on a GPU"):
        gpu.measured(run_folder(tmp_path, num_gpus=0), skip=2)
