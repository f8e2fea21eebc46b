"""A row of the benchmark as a command of each side: TRL, and the stage script as users run it."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from common.record.jsonl import read_jsonl
from common.record.run_folder import METRICS
from experiments.evidence.bench import processes
from experiments.evidence.bench.rows import (
    BETA,
    LEARNING_RATE,
    MAX_COMPLETION_LENGTH,
    MAX_PROMPT_LENGTH,
    BenchRow,
)

SIDES = ("trl", "ours")
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
MEASURED = ("step_seconds", "loss", "grad_norm", "completion_length")
REWARD_FUNCTION = "experiments/evidence/bench/reward_function.py:even_share"


def our_command(
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


def trl_command(
    row: BenchRow, fixture: Path, steps: int, output: Path, seed: int = 0, *, bf16: bool = False
) -> list[str]:
    """The same row in TRL, which adds a line to a file."""
    flags = {"row": row.name, "fixture": fixture, "steps": steps, "output": output, "seed": seed}
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += ["--bf16"] * bf16
    return ["-m", "experiments.evidence.bench.trl_stages", *words]


def run(
    side: str,
    row: BenchRow,
    fixture: Path,
    steps: int,
    output_dir: Path,
    *,
    threads: int,
    seed: int,
    bf16: bool = False,
) -> dict[str, Any]:
    """Run a row on a side: step times in seconds, the first loss and gradient norm, peak MB."""
    file = output_dir / METRICS
    words = our_command(row, fixture, steps, output_dir, seed, {"bf16": bf16})
    if side == "trl":
        words = trl_command(row, fixture, steps, file, seed, bf16=bf16)
    shutil.rmtree(output_dir, ignore_errors=True)  # a finished run is not made again
    output_dir.mkdir(parents=True)
    peak = processes.run(words, output_dir.with_suffix(".log"), threads=threads)
    records = [each for each in read_jsonl(file) if "step_seconds" in each]
    result = {n: records[0][n] for n in MEASURED if n in records[0]} | {"peak_mb": peak}
    if side == "ours":  # a record is of one step
        result["step_seconds"] = [each["step_seconds"] for each in records]
        if row.stage == "grpo":
            result["completion_length"] = mean(each["completion_length"] for each in records)
    return result
