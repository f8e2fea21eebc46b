"""Export of a trained module as a model folder in Hugging Face's format.

Also a command that writes a checkpoint's folders `model`, and with LoRA `adapter`, into it:

    python -m common.checkpoint.export output/sft/checkpoints/step_00000500
"""

import copy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers.dynamic_module_utils import custom_object_save

from common import distributed
from common.checkpoint import hf_folder, layout
from common.checkpoint.sharded_state import cause
from common.config.flags import ModelFlags
from common.errors import UserError
from common.model import fsdp, lora
from common.record.terminal import run_command
from common.text.example import Vocabulary


def save_pretrained(
    module: Any,
    vocabulary: Vocabulary,
    folder: Path,
    *,
    reward_shift: float = 0.0,
) -> None:
    """Write a `save_pretrained` folder with tokenizer, float32 safetensors. Collective.

    Adapters are merged into its weights, and also written as peft's folder `adapter` next to it.

    The submodule `lm` of the sharded module is the Hugging Face model. The folder is replaced once
    the new one is complete. `settings_of` has what the vocabulary is for.
    `reward_shift` is added to every score (see `fold_reward_shift`). A UserError on every rank if
    rank 0 could not write it.
    """
    lm = module.lm
    whole = hf_folder.once_each(module, fsdp.full_state_dict(module))  # tied parameters once
    # With `pop`, so that `state` alone refers to a weight, and can free it.
    state = {name.removeprefix("lm."): whole.pop(name) for name in list(whole)}
    with distributed.together():
        if not distributed.is_rank0():
            return
        try:
            if reward_shift and not fold_reward_shift(lm, state, reward_shift):
                # No bias to fold it into: the config keeps it, added to that of the loaded model.
                lm.config.reward_shift = module.shift + reward_shift
            settings = settings_of(lm, vocabulary)
            hf_folder.write_folders(lm, state, settings, folder)
        except Exception as error:  # of a disk, or whatever transformers refuses
            raise UserError(f"the model {folder} could not be written ({cause(error)})") from None


def settings_of(lm: Any, vocabulary: Vocabulary) -> dict[str, bytes]:
    """Every file of a model's folder but its weights: contents by name.

    Of a model with adapters also peft's `adapter_config.json`, which `write_folders` puts into the
    adapter's folder. The vocabulary's stop ids become the generation config's eos ids, so that
    `generate` stops there.
    """
    model_config = copy.deepcopy(lm.config)
    model_config.architectures = [type(lm).__name__]
    model_config.use_cache = True
    model_config.dtype = torch.float32  # not that of a base under adapters
    with TemporaryDirectory() as name:
        if lm.is_remote_code():
            custom_object_save(lm, name, config=model_config)
        model_config.save_pretrained(name)
        if lm.can_generate():
            generation = copy.deepcopy(lm.generation_config)
            generation.eos_token_id = list(vocabulary.stop_ids)
            generation.pad_token_id = vocabulary.pad_id
            generation.save_pretrained(name)
        if settings := getattr(lm, "peft_config", {}).get(lora.ADAPTER):
            settings = copy.copy(settings)
            settings.inference_mode = True  # as peft writes it
            settings.save_pretrained(name)
        vocabulary.tokenizer.save_pretrained(name)
        return hf_folder.read_settings(Path(name))


def fold_reward_shift(lm: Any, state: dict[str, Tensor], shift: float) -> bool:
    """Add a constant to every score by moving the bias of the final LayerNorm along the head.

    With score = w . (n + b), b + shift w / |w|^2 adds exactly `shift`. The head has no bias in
    transformers' classifiers; so transformers computes the shift too. Returns False, with nothing
    changed, for RMSNorm, which has no bias.
    """
    head = state["score.weight"][0]  # (D,)
    inside = fsdp.inside_blocks(lm)
    for name, norm in reversed(list(lm.base_model.named_modules())):  # OPT's is in its `decoder`
        is_final = isinstance(norm, nn.LayerNorm) and norm not in inside
        if is_final and norm.bias is not None and norm.bias.shape == head.shape:
            key = f"{lm.base_model_prefix}.{name}.bias"
            state[key] = state[key] + shift * head / head.square().sum()
            return True
    return False


def main() -> None:
    """Export the checkpoint that the command line names."""
    if len(sys.argv) != 2 or not layout.is_checkpoint(sys.argv[1]):
        raise UserError("give the folder of a checkpoint, as output/sft/checkpoints/step_00000500.")
    print(hf_folder.exported(Path(sys.argv[1]), ModelFlags(sys.argv[1])))


if __name__ == "__main__":
    run_command(main)
