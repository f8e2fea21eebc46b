"""One row of the benchmark in this repository: the stage scripts, started as a user starts them."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.bench import processes
from experiments.bench.rows import (
    BETA,
    LEARNING_RATE,
    MAX_COMPLETION_LENGTH,
    MAX_PROMPT_LENGTH,
    BenchRow,
)

# The flags of each stage that make it fast; the ones that say what is computed are below.
FAST_FLAGS: dict[str, dict[str, Any]] = {
    "sft": {"micro_batch_tokens": 1024},
    "reward": {"micro_batch_tokens": 512},
    "dpo": {"micro_batch_tokens": 512},
    "grpo": {"micro_batch_tokens": 3072, "generation_batch_size": 64},
}
COMMON_FLAGS: dict[str, Any] = {
    "dataset_test_split": "",
    "max_prompt_length": MAX_PROMPT_LENGTH,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_steps": 0,
    "num_sample_prompts": 0,
    "self_check": "false",
}
REWARD_FUNCTION = "experiments/bench/reward_function.py:even_share"


def stage_flags(row: BenchRow, fixture: Path) -> dict[str, Any]:
    """The flags that say what a row computes."""
    if row.stage == "reward":
        return {"model_name_or_path": fixture / "reward_model"}
    flags: dict[str, Any] = {"model_name_or_path": fixture / "policy"}
    if row.stage == "dpo":
        # The check of the loss takes another model as reference: with the policy it is ln 2.
        reference = fixture / "reference" if row.name.startswith("check") else ""
        flags |= {"ref_model_name_or_path": reference}
    if row.stage == "grpo":
        flags |= {
            "num_generations": row.num_generations,
            "temperature": 1.0,
            "beta": BETA,
            "reward_funcs": fixture / "reward_model" if row.with_reward_model else REWARD_FUNCTION,
        }
    return flags


def command(row: BenchRow, fixture: Path, steps: int, output_dir: Path, seed: int = 0) -> list[str]:
    """The stage's script and its flags."""
    flags = COMMON_FLAGS | stage_flags(row, fixture) | FAST_FLAGS[row.stage]
    flags |= {
        "dataset_name": fixture / "data" / f"{row.data_name}.jsonl",
        "batch_size": row.num_rows,
        "max_steps": steps,
        "output_dir": output_dir,
        "seed": seed,
    }
    arguments = [f"train_{row.stage}.py"]
    for name, value in flags.items():
        arguments += [f"--{name}", str(value)]
    return arguments


def run_row(
    row: BenchRow, fixture: Path, steps: int, output_dir: Path, *, threads: int, seed: int = 0
) -> dict[str, Any]:
    """Run a row; step times in seconds, losses, mean completion length, peak memory in MB."""
    arguments = command(row, fixture, steps, output_dir, seed)
    peak = processes.run(arguments, output_dir.with_suffix(".log"), threads=threads)
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records = [record for record in records if "step_seconds" in record]
    assert len(records) == steps, f"{output_dir} logged {len(records)} of {steps} steps"
    result = {
        "step_seconds": [record["step_seconds"] for record in records],
        "loss": records[0]["loss"],
        "peak_mb": peak,
    }
    if row.stage == "grpo":
        result["completion_length"] = mean(record["completion_length"] for record in records)
    return result
