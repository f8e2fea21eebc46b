"""Export of a trained module as a model folder in Hugging Face's format.

Also a command that exports a checkpoint:

    python -m common.checkpoint.export output/sft/checkpoints/step_00000500 --output_dir exported
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common import distributed
from common.checkpoint import hf_folder, layout, push
from common.checkpoint.sharded_state import cause
from common.config.flags import HubFlags, ModelFlags, path_flag
from common.config.parser import parse
from common.config.stages import TrainConfig
from common.errors import UserError
from common.model import fsdp
from common.record.run_folder import refuse_unwritable
from common.record.terminal import run_command
from common.text.example import Vocabulary


def save_pretrained(
    module: Any,
    vocabulary: Vocabulary,
    folder: Path,
    config: TrainConfig | None = None,
    *,
    reward_shift: float = 0.0,
) -> None:
    """Write a `save_pretrained` folder with tokenizer, float32 safetensors. Collective.

    Adapters are merged into its weights, and also written as peft's folder `adapter` next to it.

    The submodule `lm` of the sharded module is the Hugging Face model. The folder is replaced once
    the new one is complete. `settings_of` has what the config and the vocabulary are for.
    `reward_shift` is added to every score (see `fold_reward_shift`).

    Raises:
        UserError: rank 0 could not write it; raised on every rank.
    """
    lm, failure = module.lm, ""
    whole = hf_folder.once_each(module, fsdp.full_state_dict(module))  # tied parameters once
    # With `pop`, so that `state` alone refers to a weight, and can free it.
    state = {name.removeprefix("lm."): whole.pop(name) for name in list(whole)}
    if distributed.is_rank0():
        try:
            if reward_shift and not hf_folder.fold_reward_shift(lm, state, reward_shift):
                # No bias to fold it into: the config keeps it, added to that of the loaded model.
                lm.config.reward_shift = module.shift + reward_shift
            settings = hf_folder.settings_of(lm, vocabulary, config)
            hf_folder.write_folders(lm, state, settings, folder)
        except Exception as error:  # of a disk, or whatever transformers refuses
            failure = f"the model {folder} could not be written ({cause(error)})"
    if failure := distributed.from_rank0(failure):
        raise UserError(failure)


# ---- the command ---------------------------------------------------------------------------------


@dataclass
class ExportConfig(HubFlags, ModelFlags):
    """The checkpoint to export."""

    _what: ClassVar = "what"
    checkpoint: str = path_flag("", "its folder; also as first word, without --", required=True)

    _model: ClassVar = "model"
    model_name_or_path: str = path_flag("", "base of adapters (empty: where the run had it)")


def main(config: ExportConfig) -> None:
    """Export a checkpoint.

    Raises:
        UserError: the folder is no checkpoint, or damaged, or `output_dir` has a model already.
    """
    checkpoint, output_dir = Path(config.checkpoint), Path(config.output_dir)
    if not (checkpoint / layout.MANIFEST).is_file():
        near = layout.newest_first(checkpoint) or layout.newest_first(checkpoint.parent)
        advice = f"; give {near[0]}" if near else ""
        raise UserError(f"{checkpoint} is no folder of a checkpoint{advice}.")
    if reason := layout.damage(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} cannot be exported: {reason}.")
    refuse_unwritable(config.output_dir)
    if (model := output_dir / "model").exists():
        raise UserError(f"{model} is there already; remove it or name another --output_dir.")
    distributed.quieten()
    config = hf_folder.with_folders(config)
    push.prepare(config)
    hf_folder.export(checkpoint, output_dir, config, config.model_name_or_path)
    print(f"the model is in {model}", flush=True)
    push.push(output_dir, config)


if __name__ == "__main__":
    words = sys.argv[1:]
    is_named = not words or words[0].startswith("-")
    run_command(lambda: main(parse(ExportConfig, words if is_named else ["--checkpoint", *words])))
