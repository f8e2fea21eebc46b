"""Sizes of a forward pass that a GPU's memory chooses where no flag gives them.

What a token takes while a model trains: 17 numbers per block and unit of width (Korthikanti et al.
2022, arXiv 2205.05198, section 4.1: 34 bytes in 16 bits, without the scores of attention).
"""

import dataclasses
from collections.abc import Set
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from common import distributed
from common.config.stages import CommonConfig, TrainConfig
from common.errors import gist
from common.model import fsdp, load

Config = TypeVar("Config", bound=CommonConfig)
NAMES = ("micro_batch_tokens", "generation_batch_size")
KEPT_NUMBERS = 17
STATE_BYTES = 24  # of a parameter: float32 with gradient and Adam's moments, copies, frozen models
SHARE = 0.6  # of the memory that is left, for what a micro-batch keeps
CACHE_SHARE = 0.1  # of all memory, for sampling's keys and values
FEWEST, MOST = 4096, 65536  # tokens of a micro-batch
COMPLETIONS = 256  # decoded at once, if there is room for their keys and values


def for_device(config: Config, given: Set[str]) -> Config:
    """The config of a training run on GPUs with sizes for the smallest of them. Collective.

    The flags that were `given` keep their values, and all do on a CPU or for a model whose shape
    has other names.
    """
    names = {f.name for f in dataclasses.fields(config)} & {*NAMES} - given
    memory = distributed.device_memory()
    if not (isinstance(config, TrainConfig) and names and memory):
        return config
    model_config = load.find_config(config.model_name_or_path, None, config)
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(
                model_config, trust_remote_code=config.trust_remote_code
            )
        text: Any = lm.config.get_text_config()
        width, num_heads = text.hidden_size, text.num_attention_heads
    except Exception as error:  # of many types, by what a model needs
        why = f"the shape of {config.model_name_or_path!r} is not known: {gist(error)}"
        distributed.print_rank0(f"sizes of a pass stay the default, because {why}")
        return config
    num_layers = len(fsdp.blocks(lm))
    num_key_heads = getattr(text, "num_key_value_heads", None) or num_heads
    size = 2 if config.bf16 else 4
    num_blocks = 1 if config.gradient_checkpointing else num_layers
    per_token = (KEPT_NUMBERS * num_blocks + num_layers - num_blocks) * width * size
    num_numbers = sum(p.numel() for p in lm.parameters())
    left = memory - STATE_BYTES * num_numbers / distributed.world_size()
    tokens = int(SHARE * left / per_token) // 1024 * 1024
    cached = (
        int(CACHE_SHARE * memory / (2 * num_layers * width * size)) * num_heads // num_key_heads
    )
    # Sampling keeps the keys and values of a prompt once for its completions
    num_samples: int = config.candidates_per_prompt
    per_completion = config.max_completion_length + config.max_prompt_length / num_samples
    completions = min(COMPLETIONS, int(cached / per_completion))
    chosen = (max(FEWEST, min(MOST, tokens)), max(num_samples, completions))
    sizes: dict[str, Any] = {
        name: value for name, value in zip(NAMES, chosen, strict=True) if name in names
    }
    chosen_text = ", ".join(f"{name} {value}" for name, value in sizes.items())
    distributed.print_rank0(f"by the GPU's {memory / 1e9:.0f} GB: {chosen_text}")
    return dataclasses.replace(config, **sizes)
