"""One row of the benchmark in this repository: the stage scripts, started as a user starts them."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from common.record.run_folder import read_metrics
from experiments.evidence.bench import processes
from experiments.evidence.bench.rows import (
    BETA,
    LEARNING_RATE,
    MAX_COMPLETION_LENGTH,
    MAX_PROMPT_LENGTH,
    BenchRow,
)

# What makes each stage fast, and computes the same
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
REWARD_FUNCTION = "experiments/evidence/bench/reward_function.py:even_share"


def command(
    row: BenchRow,
    fixture: Path,
    steps: int,
    output_dir: Path,
    seed: int = 0,
    more: Mapping[str, Any] | None = None,
) -> list[str]:
    """The stage's script and its flags, with `more` of them."""
    flags = COMMON_FLAGS | FAST_FLAGS[row.stage]
    flags |= {
        "model_name_or_path": fixture / ("reward_model" if row.stage == "reward" else "policy"),
        "dataset_name": fixture / "data" / f"{row.data_name}.jsonl",
        "batch_size": row.num_rows,
        "max_steps": steps,
        "output_dir": output_dir,
        "seed": seed,
    }
    if row.stage == "grpo":
        flags |= {
            "num_generations": row.num_generations,
            "temperature": 1.0,
            "beta": BETA,
            "reward_funcs": fixture / "reward_model" if row.with_reward_model else REWARD_FUNCTION,
        }
    flags |= more or {}
    words = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [f"train_{row.stage}.py", *words]


def run_row(
    row: BenchRow, fixture: Path, steps: int, output_dir: Path, *, threads: int, seed: int = 0
) -> dict[str, Any]:
    """Run a row: step times in seconds, the first loss and gradient norm, peak memory in MB."""
    arguments = command(row, fixture, steps, output_dir, seed)
    peak = processes.run(arguments, output_dir.with_suffix(".log"), threads=threads)
    records = [record for record in read_metrics(output_dir) if "step_seconds" in record]
    assert len(records) == steps, f"{output_dir} logged {len(records)} of {steps} steps"
    result = {
        "step_seconds": [record["step_seconds"] for record in records],
        "loss": records[0]["loss"],
        "grad_norm": records[0]["grad_norm"],
        "peak_mb": peak,
    }
    if row.stage == "grpo":
        result["completion_length"] = mean(record["completion_length"] for record in records)
    return result
