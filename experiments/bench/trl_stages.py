"""One row of the benchmark in TRL, at the settings that make it fastest on a CPU.

    python -m experiments.bench.trl_stages --row sft --fixture FOLDER --steps 6 --output sft.json

In TRL's favour: a step is timed from `on_step_begin` to `on_step_end`, which leaves out fetching
and collating its rows; nothing is logged, saved or evaluated.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from experiments.bench.reward_function import even_share
from experiments.bench.rows import BETA, LEARNING_RATE, MAX_COMPLETION_LENGTH, BenchRow, find_row

# Rows in one forward pass. One at a time is fastest where rows differ in length: nothing is padded.
MICRO_BATCH_SIZE = 1
# GRPO pads all completions of a step to one width whatever the micro-batch, so that larger ones
# cost no padding: 8 was at least as fast as 1 in short trials, and takes 1.3 instead of 0.75 GB
# with the tiny model. The benchmark's `--trl_grpo_micro_batch_size 1` compares with the leaner one.
GRPO_MICRO_BATCH_SIZE = 8
LENGTH_METRIC = "completions/mean_length"


class StepTimer(TrainerCallback):
    """Wall time of every optimiser step."""

    def __init__(self) -> None:
        """Nothing was measured yet."""
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self.started)


def common_settings(
    row: BenchRow, steps: int, folder: str, micro_batch_size: int, seed: int
) -> dict[str, Any]:
    """What every trainer is given: float32, no recomputation, a fused optimiser, nothing beside."""
    per_step = row.num_rows * max(1, row.num_generations)
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": per_step // micro_batch_size,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "torch_compile": False,
        "seed": seed,
    }


def load_model(folder: Path, auto_class: Any = AutoModelForCausalLM) -> Any:
    """A model of the fixture in float32 with fused attention."""
    return auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def make_trainer(
    row: BenchRow,
    fixture: Path,
    steps: int,
    folder: str,
    grpo_micro_batch_size: int = GRPO_MICRO_BATCH_SIZE,
    seed: int = 0,
) -> Any:
    """The trainer of a row."""
    path = fixture / "data" / f"{row.data_name}.jsonl"
    texts = [json.loads(line) for line in path.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(fixture / "policy")
    rest = {"train_dataset": datasets.Dataset.from_list(texts), "processing_class": tokenizer}
    make = {"sft": make_sft, "reward": make_reward, "dpo": make_dpo, "grpo": make_grpo}[row.stage]
    size = grpo_micro_batch_size if row.stage == "grpo" else MICRO_BATCH_SIZE
    return make(row, fixture, common_settings(row, steps, folder, size, seed), rest)


def make_sft(row: BenchRow, fixture: Path, settings: dict[str, Any], rest: dict[str, Any]) -> Any:
    """Loss on completions only, nothing packed."""
    config = trl.SFTConfig(completion_only_loss=True, packing=False, padding_free=False, **settings)
    return trl.SFTTrainer(load_model(fixture / "policy"), config, **rest)


def make_reward(
    row: BenchRow, fixture: Path, settings: dict[str, Any], rest: dict[str, Any]
) -> Any:
    """From the fixture's reward model, so that both sides have the same head."""
    model = load_model(fixture / "reward_model", AutoModelForSequenceClassification)
    return trl.RewardTrainer(model, trl.RewardConfig(disable_dropout=True, **settings), **rest)


def make_dpo(row: BenchRow, fixture: Path, settings: dict[str, Any], rest: dict[str, Any]) -> Any:
    """The reference is the starting policy; in the check of the loss it is another model."""
    reference = fixture / ("reference" if row.name.startswith("check") else "policy")
    config = trl.DPOConfig(
        precompute_ref_log_probs=True,  # as this project does
        precompute_ref_batch_size=MICRO_BATCH_SIZE,
        padding_free=False,
        disable_dropout=True,
        **settings,
    )
    return trl.DPOTrainer(load_model(fixture / "policy"), load_model(reference), config, **rest)


def make_grpo(row: BenchRow, fixture: Path, settings: dict[str, Any], rest: dict[str, Any]) -> Any:
    """One update per rollout; a KL weight above 0, so that the reference is computed."""
    reward = str(fixture / "reward_model") if row.with_reward_model else even_share
    config = trl.GRPOConfig(
        num_generations=row.num_generations,
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=1.0,
        beta=BETA,
        shuffle_dataset=False,
        disable_dropout=True,
        use_vllm=False,
        **settings,
    )
    return trl.GRPOTrainer(load_model(fixture / "policy"), reward, config, **rest)


def main() -> None:
    """Train and write step times, the mean loss and the mean completion length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", required=True)
    parser.add_argument("--fixture", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--grpo_micro_batch_size", type=int, default=GRPO_MICRO_BATCH_SIZE)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    row, timer = find_row(arguments.row), StepTimer()
    with tempfile.TemporaryDirectory() as folder:
        size, seed = arguments.grpo_micro_batch_size, arguments.seed
        trainer = make_trainer(row, arguments.fixture, arguments.steps, folder, size, seed)
        trainer.add_callback(timer)
        result = trainer.train()
    record = {"step_seconds": timer.seconds, "loss": result.training_loss}
    if row.stage == "grpo":
        # Without logging, the one record at the end averages over all steps.
        record["completion_length"] = float(trainer.state.log_history[-1][LENGTH_METRIC])
    arguments.output.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
