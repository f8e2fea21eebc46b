"""A stage of the demo's chain in TRL, by the flags of our script.

    torchrun --standalone --nproc_per_node 2 -m assets.recipes.bench.trl_chain dpo \
        --config assets/recipes/demo/dpo.yaml --dataset_name FILE

`start` writes to `--output_dir` what both chains begin with: random weights of the demo's GPT-2,
its tokenizer, and the rows of every stage.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2LMHeadModel,
    set_seed,
)

from common.config.parser import parse
from common.model.load import read_model_config
from common.record.jsonl import json_line, write_atomically
from common.text import synthetic
from common.text.reading import load_rows
from experiments.evidence.bench.rows import KINDS
from experiments.evidence.bench.trl_stages import trainer_of
from experiments.runs.stages import config_class

# Rows in a forward of a process: the fastest of 8, 16 and (GRPO) 32 in a few steps of each stage.
MICRO_BATCH_SIZE = {"sft": 8, "reward": 8, "dpo": 16, "grpo": 16}
# Flags that TRL has under the same name
SAME = ("output_dir", "seed", "max_steps", "save_steps", "warmup_steps", "max_grad_norm")
SAME += ("learning_rate", "lr_scheduler_type", "adam_beta2")
SAME_OF_STAGE = {
    "dpo": ("beta",),
    "grpo": ("beta", "temperature", "num_generations", "max_completion_length"),
}


def read_config(stage: str, flags: Sequence[str]) -> Any:
    """What our script of a stage makes of these flags."""
    return parse(config_class(f"train_{stage}.py"), flags)


def make_start(config: Any) -> None:
    """Write the model that both chains start from, without dropout, and the rows."""
    set_seed(config.seed)
    tokenizer = synthetic.train_tokenizer()
    shape = read_model_config(config.model_name_or_path, "policy", tokenizer, config)
    shape.pad_token_id = tokenizer.pad_token_id
    folder = Path(config.output_dir)
    for part in (GPT2LMHeadModel(shape), tokenizer):
        part.save_pretrained(folder / "model")
    for stage, kind in KINDS.items():
        recipe = read_config(stage, [f"--config=assets/recipes/demo/{stage}.yaml"])
        rows = load_rows(recipe, "synthetic", "train", kind, recipe.num_train_rows)
        write_atomically(folder / f"{stage}.jsonl", map(json_line, rows))


def make_trainer(stage: str, config: Any, *, with_stop: bool) -> Any:
    """The trainer of a stage; what TRL has no setting for is as TRL has it."""
    size, more = MICRO_BATCH_SIZE[stage], {}
    per_step = config.batch_size * (config.num_generations if stage == "grpo" else 1)
    settings = {name: getattr(config, name) for name in (*SAME, *SAME_OF_STAGE.get(stage, ()))}
    settings |= {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": per_step // (size * int(os.environ["WORLD_SIZE"])),
        "ddp_backend": "gloo",
        "save_strategy": "steps" if config.save_steps else "no",
        "save_only_model": True,
    }
    if stage == "grpo":
        settings["loss_type"] = config.aggregation
        settings["scale_rewards"] = config.advantages
        (reward,) = config.reward_funcs
        more["reward_funcs"] = stopped_reward(reward) if with_stop else reward
    else:
        settings["max_length"] = config.max_prompt_length + config.max_completion_length
    if stage == "sft":
        settings["completion_only_loss"] = True
    if stage == "dpo":
        settings["precompute_ref_log_probs"] = True
    file = config.dataset_name
    cache = file.removesuffix(".jsonl")  # on the disk: the processes share it
    rows = datasets.load_dataset("json", data_files=file, cache_dir=cache)["train"]
    return trainer_of(stage, Path(config.model_name_or_path), rows, settings, **more)


def stopped_reward(path: str) -> Any:
    """The reward model on completions with their stop token, as it was trained.

    TRL's GRPO decodes completions without special tokens, and so reads the reward one token early.
    """
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="right")

    @torch.no_grad()
    def stopped_reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        is_stopped = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        ends = [tokenizer.eos_token * stopped for stopped in is_stopped]
        texts = ["".join(parts) for parts in zip(prompts, completions, ends, strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return list(logits[:, 0].tolist())

    return stopped_reward


def main() -> None:
    """Make the start, or train a stage and export its model."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("stage", choices=["start", *KINDS])
    parser.add_argument("--with_stop", action="store_true", help="GRPO: see `stopped_reward`")
    arguments, flags = parser.parse_known_args()
    is_start = arguments.stage == "start"
    config = read_config("sft" if is_start else arguments.stage, flags)
    if is_start:
        make_start(config)
        return
    trainer = make_trainer(arguments.stage, config, with_stop=arguments.with_stop)
    trainer.train()
    trainer.save_model(str(Path(config.output_dir, "model")))


if __name__ == "__main__":
    main()
