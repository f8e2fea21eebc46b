"""Plain model folders, which transformers, TRL and peft load as they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from common import distributed, fsdp, lora, run_state
from common.checkpoint_files import replacing


def save_pretrained(
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    stop_ids: Sequence[int] = (),
    reward_shift: float = 0.0,
) -> None:
    """Write a plain `save_pretrained` folder with tokenizer, float32 safetensors. Collective.

    Adapters are merged into its weights, and also written as peft's folder `adapter` beside it.

    Args:
        module: sharded; its submodule `lm` is the Hugging Face model.
        tokenizer: saved beside the weights.
        folder: replaced whole once the new one is complete.
        stop_ids: recorded as the generation config's eos ids, so that `generate` stops there.
        reward_shift: added to every score (see `fold_reward_shift`).
    """
    state = run_state.once_each(module, fsdp.full_state_dict(module))
    if distributed.is_rank0():
        wrapper: Any = module
        lm = wrapper.lm
        state = {name.removeprefix("lm."): tensor for name, tensor in state.items()}
        if lora.adapted_layers(lm):
            with replacing(folder.with_name("adapter")) as partial:
                lora.save_adapter(lm, state, partial)
                tokenizer.save_pretrained(partial)
            state = lora.merged_state(lm, state)
        if reward_shift and not fold_reward_shift(lm, state, reward_shift):
            lm.config.reward_shift = wrapper.shift + reward_shift  # it may have come with one
        if stop_ids and getattr(lm, "generation_config", None) is not None:
            lm.generation_config.eos_token_id = list(stop_ids)
            lm.generation_config.pad_token_id = tokenizer.pad_token_id
        lm.config.use_cache = True
        with replacing(folder) as partial:
            lm.save_pretrained(partial, state_dict=state)
            tokenizer.save_pretrained(partial)
    distributed.barrier()


def fold_reward_shift(lm: Any, state: dict[str, torch.Tensor], shift: float) -> bool:
    """Add a constant to every score by moving the bias of the final LayerNorm along the head.

    With score = w . (n + b), b + shift w / |w|^2 adds exactly `shift`. The head itself has no bias
    in transformers' classifiers, so this is how plain transformers sees the shift as well. RMSNorm
    has no bias; then nothing is changed and the result is False.
    """
    prefix = lm.base_model_prefix
    for name, part in reversed(list(lm.base_model.named_children())):
        if isinstance(part, nn.LayerNorm) and part.bias is not None:
            head = state["score.weight"][0]  # (D,)
            key = f"{prefix}.{name}.bias"
            state[key] = state[key] + shift * head / head.square().sum()
            return True
    return False
