"""A stage of the demo's chain in TRL, at the settings of our recipe.

    torchrun --standalone --nproc_per_node 2 -m experiments.bench.trl_chain dpo \
        --model FOLDER --rows FILE --seed 0 --save_steps 10 --output_dir FOLDER

`start` writes to `--output_dir` what both chains begin with: random weights of the demo's GPT-2,
its tokenizer, and the rows of every stage.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    set_seed,
)

from common.config.parser import parse
from common.record.jsonl import json_line, write_atomically
from common.text import synthetic
from common.text.reading import load_rows
from experiments.bench.rows import BenchRow
from experiments.bench.trl_stages import common_settings
from experiments.stages import config_class

RECIPES = "assets/recipes/demo"
KINDS = {"sft": "sft", "reward": "preference", "dpo": "preference", "grpo": "prompts"}
# Rows in a forward of a process: the fastest of 8, 16 and (GRPO) 32 in a few steps of each stage.
MICRO_BATCH_SIZE = {"sft": 8, "reward": 8, "dpo": 16, "grpo": 16}


def make_start(folder: Path, seed: int) -> None:
    """Write the model that both chains start from, without dropout, and the rows."""
    set_seed(seed)
    tokenizer = synthetic.train_tokenizer()
    shape = json.loads(Path(RECIPES, "gpt2-tiny.json").read_text())
    shape |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    shape |= dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    for part in (GPT2LMHeadModel(GPT2Config(**shape)), tokenizer):
        part.save_pretrained(folder / "model")
    for stage, kind in KINDS.items():
        config = demo_config(stage)
        rows = load_rows(config, "synthetic", "train", kind, config.num_train_rows)
        write_atomically(folder / f"{stage}.jsonl", map(json_line, rows))


def demo_config(stage: str) -> Any:
    """Our settings of a stage."""
    return parse(config_class(f"train_{stage}.py"), ["--config", f"{RECIPES}/{stage}.yaml"])


def settings_of(config: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The benchmark's settings of a trainer, with our optimiser and schedule."""
    stage, number = arguments.stage, int(os.environ.get("WORLD_SIZE", "1"))
    group, size = config.num_generations if stage == "grpo" else 0, MICRO_BATCH_SIZE[stage]
    row = BenchRow(stage, stage, "", config.batch_size, 0, 0, None, group)
    steps, folder = arguments.max_steps or config.max_steps, str(arguments.output_dir)
    names = ("learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta2", "max_grad_norm")
    return {
        **common_settings(row, steps, folder, size * number, arguments.seed),
        **{name: getattr(config, name) for name in names},
        "per_device_train_batch_size": size,
        "ddp_backend": "gloo" if number > 1 else None,
        "save_strategy": "steps" if arguments.save_steps else "no",
        "save_steps": arguments.save_steps or 1,
        "save_only_model": True,
    }


def make_trainer(arguments: argparse.Namespace) -> Any:
    """The trainer of a stage; what TRL has no setting for is as TRL has it."""
    stage, config = arguments.stage, demo_config(arguments.stage)
    settings = settings_of(config, arguments)
    longest = config.max_prompt_length + config.max_completion_length
    cache = str(arguments.rows.with_suffix(""))  # on the disk: the processes share it
    rows = datasets.load_dataset("json", data_files=str(arguments.rows), cache_dir=cache)["train"]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rest = {"train_dataset": rows, "processing_class": tokenizer}
    if stage == "reward":
        set_seed(arguments.seed)  # of its head
        model = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=1)
        return trl.RewardTrainer(model, trl.RewardConfig(max_length=longest, **settings), **rest)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if stage == "sft":
        sft = trl.SFTConfig(completion_only_loss=True, max_length=longest, **settings)
        return trl.SFTTrainer(model, sft, **rest)
    if stage == "dpo":
        known = {"beta": config.beta, "max_length": longest, "precompute_ref_log_probs": True}
        return trl.DPOTrainer(model, None, trl.DPOConfig(**known, **settings), **rest)
    grpo = trl.GRPOConfig(
        num_generations=config.num_generations,
        max_completion_length=config.max_completion_length,
        temperature=config.temperature,
        beta=config.beta,
        loss_type=config.aggregation,
        scale_rewards=config.scale_rewards,
        **settings,
    )
    reward: Any = str(arguments.reward_model)
    if arguments.with_stop:
        reward = StoppedReward(arguments.reward_model)
    return trl.GRPOTrainer(model, reward, grpo, **rest)


class StoppedReward:
    """The reward model on completions with their stop token, as it was trained.

    TRL's GRPO decodes completions without special tokens, and so reads the reward one token early.
    """

    __name__ = "stopped_reward"

    def __init__(self, path: Path) -> None:
        """Load it."""
        self.model = AutoModelForSequenceClassification.from_pretrained(path).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="right")

    @torch.no_grad()
    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """A reward for each completion."""
        stop, eos = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        ends = [stop if ids[-1] == eos else "" for ids in completion_ids]
        texts = ["".join(parts) for parts in zip(prompts, completions, ends, strict=True)]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True)
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return list(logits[:, 0].tolist())


def main() -> None:
    """Make the start, or train a stage and export its model."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("stage", choices=["start", *KINDS])
    for name in ("--model", "--rows", "--reward_model", "--output_dir"):
        parser.add_argument(name, type=Path)
    for name in ("--seed", "--save_steps", "--max_steps"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--with_stop", action="store_true")
    arguments = parser.parse_args()
    if arguments.stage == "start":
        make_start(arguments.output_dir, arguments.seed)
        return
    trainer = make_trainer(arguments)
    trainer.train()
    trainer.save_model(str(arguments.output_dir / "model"))


if __name__ == "__main__":
    main()
