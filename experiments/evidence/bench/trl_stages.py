"""One row of the benchmark in TRL, at the settings that make it fastest on a CPU or on a GPU.

    python -m experiments.evidence.bench.trl_stages --row sft --fixture FOLDER ...
    python -m experiments.evidence.bench.trl_stages --row gpu-sft --sizes 16 32 64 ...

In TRL's favour: a step is timed from `on_step_begin` to `on_step_end`, which leaves out fetching
and collating its rows; nothing is saved or evaluated, and only the first step is logged.
"""

import argparse
import gc
import importlib.util
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
import trl
from transformers import AutoTokenizer, TrainerCallback

from common.distributed import peak_resident_gb
from common.errors import gist
from common.record.jsonl import json_line, read_jsonl
from experiments.evidence.bench.clock import timer
from experiments.evidence.bench.reward_function import even_share
from experiments.evidence.bench.rows import (
    BETA,
    EVERY_ROW,
    LEARNING_RATE,
    MAX_COMPLETION_LENGTH,
    BenchRow,
)

# Rows in one forward pass. One at a time is fastest where rows differ in length: nothing is padded.
# GRPO pads all completions of a step to one width whatever the micro-batch, so that larger ones
# cost no padding: 8 was at least as fast as 1 in short trials, and takes 1.3 instead of 0.75 GB
# with the tiny model.
MICRO_BATCH_SIZE = {"sft": 1, "reward": 1, "dpo": 1, "grpo": 8}
# Of every trainer: no recomputation, a fused optimiser, nothing saved or evaluated, and only the
# first step logged, which is warm-up
SETTINGS: dict[str, Any] = {
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "logging_first_step": True,
    "disable_tqdm": True,
}
SETTINGS_OF_STAGE: dict[str, dict[str, Any]] = {
    "sft": {"completion_only_loss": True},
    "reward": {},
    "dpo": {"precompute_ref_log_probs": True},  # as here
    # One update per rollout; a KL weight above 0, so that the reference is computed
    "grpo": {
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "beta": BETA,
        "shuffle_dataset": False,
        "disable_dropout": True,
    },
}
LENGTH_METRIC = "completions/mean_length"


class StepTimer(TrainerCallback):
    """Wall time of every optimiser step; `timer` waits for the GPU first."""

    def __init__(self) -> None:
        """Nothing was measured yet."""
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started = timer()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop it."""
        self.seconds.append(timer() - self.started)


def trainer_of(
    stage: str, path: Path, rows: datasets.Dataset, settings: dict[str, Any], **more: Any
) -> Any:
    """TRL's trainer of a stage; TRL loads the model in float32.

    It computes in bfloat16 on a GPU, or where `settings` say so.
    """
    trainer, config = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }[stage]
    on_gpu, tokenizer = torch.cuda.is_available(), AutoTokenizer.from_pretrained(path)
    device = {"bf16": on_gpu, "use_cpu": not on_gpu, "dataloader_pin_memory": on_gpu}
    more |= {"args": config(**SETTINGS | device | settings), "processing_class": tokenizer}
    return trainer(str(path), train_dataset=rows, **more)


def train(
    row: BenchRow, fixture: Path, steps: int, seed: int, size: int, **more_settings: Any
) -> dict[str, Any]:
    """Train a row in micro-batches of `size` rows.

    Returns step times, the first loss and gradient norm, and GRPO's mean completion length.
    """
    settings = SETTINGS_OF_STAGE[row.stage] | more_settings
    settings |= {
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": row.num_rows * max(1, row.num_generations) // size,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
    }
    more: dict[str, Any] = {}
    if row.stage == "dpo":
        settings["precompute_ref_batch_size"] = size
    if row.stage == "grpo":
        settings["num_generations"] = row.num_generations
        reward_model = str(fixture / "reward_model")
        more["reward_funcs"] = reward_model if row.with_reward_model else even_share
    rows = datasets.Dataset.from_list(read_jsonl(fixture / "data" / f"{row.data_name}.jsonl"))
    model = fixture / ("reward_model" if row.stage == "reward" else "policy")
    steps_timer = StepTimer()
    with tempfile.TemporaryDirectory() as folder:
        settings["output_dir"] = folder
        trainer = trainer_of(row.stage, model, rows, settings, **more)
        trainer.add_callback(steps_timer)
        trainer.train()
    log = trainer.state.log_history
    record = {"step_seconds": steps_timer.seconds} | {n: log[0][n] for n in ("loss", "grad_norm")}
    if row.stage == "grpo":  # the record at the end averages over all steps that were not logged
        record["completion_length"] = float(log[-1][LENGTH_METRIC])
    return record


def tune(arguments: argparse.Namespace) -> None:
    """Train at every micro-batch, then at the fastest with each extra; a line each, at once.

    What fails leaves its error, as memory does: the others may fit. Without a choice it is raised.
    """
    row, seconds, on_gpu = EVERY_ROW[arguments.row], {}, torch.cuda.is_available()
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    sizes = arguments.sizes or [MICRO_BATCH_SIZE[row.stage]]
    extras = [name for name in arguments.extras if has_liger or name != "use_liger_kernel"]
    for size, extra in [*((size, "") for size in sizes), *((0, name) for name in extras)]:
        size = size or min(seconds, key=seconds.__getitem__, default=0)
        settings = {extra: True} if extra else {}
        if arguments.bf16:
            settings["bf16"] = True
        record: dict[str, Any] = {"variant": f"{size} rows" + f", {extra}" * bool(extra)}
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            record |= train(
                row, arguments.fixture, arguments.steps, arguments.seed, size, **settings
            )
            if not extra:
                seconds[size] = median(record["step_seconds"][row.warmup :])
            peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else peak_resident_gb()
            record["peak_gb"] = peak
        except Exception as error:
            if not arguments.sizes:
                raise
            record["error"] = gist(error)
        with arguments.output.open("a") as file:
            file.write(json_line(record))


def main() -> None:
    """Train, and add to the output a line of what `train` returns for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=EVERY_ROW, required=True)
    parser.add_argument("--fixture", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="on a CPU too")
    parser.add_argument("--sizes", type=int, nargs="*", help="rows of a micro-batch to try")
    extras_help = "settings to try at the fastest of them"
    parser.add_argument("--extras", nargs="*", default=[], help=extras_help)
    tune(parser.parse_args())


if __name__ == "__main__":
    main()
