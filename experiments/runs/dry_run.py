"""The start of every stage of a chain without its training: flags, tokenizer, models and rows.

The `main` of each stage runs in this process until it would read a model's weights. Its output
folder then gets what later stages start from: the config and the tokenizer of a model, or pairs.
"""

import importlib
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from common import distributed
from common.errors import UserError
from common.model import load
from common.rewards.score import RewardFunctions
from common.text.reading import held_out_split, load_rows
from experiments.runs import stages
from experiments.runs.stages import Stage
from experiments.sample_pairs import Pair, write_rows


class Started(Exception):  # noqa: N818 - a stage has come to its weights
    """A stage would read weights; the arguments are those of `load.load` or of a judge's load."""


def start(chain: Iterable[Stage]) -> None:
    """Start the stages in order, each in its own new folder. Not for several processes.

    Raises:
        UserError: a stage refuses its flags, tokenizer, models or rows.
    """
    is_alone = not dist.is_initialized()
    distributed.start()
    replaced: list[tuple[Any, str, Any]] = [(load, "load", come_to_weights)]
    replaced.append((RewardFunctions, "load", come_to_weights))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, new in replaced:
            setattr(owner, name, new)
        for stage in chain:
            start_stage(stage)
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
        if is_alone:
            dist.destroy_process_group()


def come_to_weights(*arguments: Any) -> None:
    """End a stage where it reads weights."""
    raise Started(*arguments)


def start_stage(stage: Stage) -> None:
    """Start a stage, and leave what later ones start from."""
    print(f"\n=== {stage.script}, without training", flush=True)
    config = stages.config_of(stage)
    if stage.script in stages.DRIVERS:  # which asks for runs of what others have left
        return
    module = importlib.import_module(stage.script.removesuffix(".py").replace("/", "."))
    try:
        module.main(config)
    except UserError as error:
        raise UserError(f"{stage.script} for {stage.output_dir}: {error}") from None
    except Started as started:
        if stage.script.startswith("train_"):
            write_model(stage, config, *started.args[:3])
        elif stage.script == "experiments/sample_pairs.py":
            write_pairs(stage, config)


def write_model(stage: Stage, config: Any, auto_class: Any, path: str, model_config: Any) -> None:
    """The folder of the model that a stage would export, without weights."""
    folder = stage.output_dir / "model"
    if auto_class is AutoModelForSequenceClassification:
        model_config.architectures, model_config.num_labels = ["ForSequenceClassification"], 1
    model_config.save_pretrained(folder)
    load.load_tokenizer(config.tokenizer_path, config).save_pretrained(folder)


def write_pairs(stage: Stage, config: Any) -> None:
    """Pairs of the right form, of the prompts that a policy would be asked."""
    held_out = held_out_split(config, config.dataset_name)
    for split in filter(None, (config.dataset_train_split, held_out)):
        rows = load_rows(config, config.dataset_name, split, "prompts")
        pairs = (Pair(0, str(row["prompt"]), " yes", " no", 1.0, 0.0) for row in rows)
        write_rows(stage.output_dir, split, pairs)
