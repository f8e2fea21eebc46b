"""Plain model folders of runs and checkpoints, which transformers, TRL and peft load.

A checkpoint also holds the settings of such a folder: its files other than weights. So a checkpoint
alone can be exported, and the result equals the run's exported model to the bit. Only adapters need
their base.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common import distributed
from common.checkpoint import layout
from common.config.flags import ModelFlags, values_of
from common.errors import UserError, gist
from common.model import checks, load, lora
from common.record.run_folder import CONFIG

Config = TypeVar("Config", bound=ModelFlags)
NOT_MODELS = ("output_dir", "resume_from_checkpoint")  # paths of other things
OF_MODEL = ("config.json", "generation_config.json")  # in the folder of whole weights only


# ---- settings: all files but weights -------------------------------------------------------------


def read_settings(folder: Path) -> dict[str, bytes]:
    """The files in a folder and its subfolders, by name."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_settings(
    settings: Mapping[str, bytes], folder: Path, without: Sequence[str] = ()
) -> None:
    """Write settings into a folder."""
    for name, content in settings.items():
        if name not in without:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


# ---- folders -------------------------------------------------------------------------------------


def write_folders(
    lm: Any,
    state: dict[str, Tensor],
    settings: Mapping[str, bytes],
    folder: Path,
) -> None:
    """Write a model with its adapter merged, and the adapter as the folder `adapter` next to it.

    Of `lm` only the structure is read. `state` has the whole weights; base weights are moved out,
    so that none is held twice. A UserError for weights that are not finite.
    """
    if lora.adapted_layers(lm):
        with layout.replacing(folder.with_name("adapter")) as partial:
            lora.save_adapter(lm, state, partial)
            write_settings(settings, partial, without=OF_MODEL)
        state = lora.merged_state(lm, state)
    if bad := [name for name, weight in state.items() if not weight.isfinite().all()]:
        raise UserError(f"a weight is not finite: {bad[0]}.")
    with layout.replacing(folder) as partial:
        # safetensors builds each file in memory
        lm.save_pretrained(partial, state_dict=state, max_shard_size="5GB")
        write_settings(settings, partial, without=[lora.SETTINGS_FILE])


def once_each(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A module's state with each tied parameter once, under the first of its names."""
    every = (name for name, _ in module.named_parameters(remove_duplicate=False))
    second_names = set(every) - {name for name, _ in module.named_parameters()}
    return {name: value for name, value in state.items() if name not in second_names}


# ---- checkpoints ---------------------------------------------------------------------------------


def export(checkpoint: Path, config: ModelFlags) -> None:
    """Write a checkpoint's `model`, its `adapter` if it has one, and the `config.yaml` of its run.

    Into the checkpoint, which must be whole. Needs memory for one copy of the weights. A UserError
    if the base of its adapters cannot be read.
    """
    folder = checkpoint / layout.SETTINGS
    model_config = load.find_config(str(folder), None, config)
    is_classifier = checks.is_classifier(model_config)
    if is_classifier:
        checks.ensure_classifier(model_config)
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    with torch.device("meta"):
        lm: Any = auto_class.from_config(model_config, trust_remote_code=config.trust_remote_code)
    state = read_weights(checkpoint)
    if (folder / lora.SETTINGS_FILE).exists():
        from peft import LoraConfig

        of_adapter = LoraConfig.from_pretrained(str(folder))
        lora.inject(lm, of_adapter)
        lm.peft_config = {lora.ADAPTER: of_adapter}
        base, revision = of_adapter.base_model_name_or_path, of_adapter.revision
        of_base = replace(config, model_name_or_path=base, model_revision=revision or "main")
        state = read_base(base, folder, of_base, is_classifier=is_classifier) | state
    write_folders(lm, state, read_settings(folder), checkpoint / "model")
    flags = yaml.safe_dump(layout.read_manifest(checkpoint)["config"], sort_keys=False)
    (checkpoint / CONFIG).write_text(flags, encoding="utf-8")


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The whole weights of the Hugging Face model in a checkpoint, by its names."""
    reader, prefix = HuggingFaceStorageReader(str(checkpoint)), "model.lm."
    entries: Any = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # not started, says torch
        load_shards(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def read_base(
    path: str, settings: Path, config: ModelFlags, *, is_classifier: bool
) -> dict[str, Tensor]:
    """The weights of the base of adapters, as the run loaded them."""
    model_config = load.find_config(path, None, config)
    if is_classifier:
        tokenizer = load.load_tokenizer(str(settings), config)
        lm = load.load_reward_model(path, model_config, tokenizer, config)
    else:
        lm = load.load_policy(path, model_config, config)
    return once_each(lm, lm.state_dict())


def with_folders(config: Config) -> Config:
    """A config in which checkpoints named as models are their exported `model`. Collective.

    The checkpoint is exported once, into its folder, and the export is removed with it. The ranks
    check the shards together; rank 0 writes. A UserError if one is damaged, or cannot be exported.
    """
    paths = [f for f in fields(config) if f.metadata["is_path"] and f.name not in NOT_MODELS]
    names = dict.fromkeys(name for f in paths for name in values_of(config, f))
    checkpoints = list(filter(layout.is_checkpoint, names))
    folders = {name: exported(Path(name), config) for name in distributed.from_rank0(checkpoints)}
    changed: dict[str, Any] = {}
    for f in paths if folders else ():
        new = [folders.get(name, name) for name in values_of(config, f)]
        changed[f.name] = new if isinstance(getattr(config, f.name), list) else new[0]
    return replace(config, **changed)


def exported(checkpoint: Path, config: ModelFlags) -> str:
    """The folder `model` in a checkpoint, exported if it is missing. Collective."""
    model = checkpoint / "model"
    if distributed.from_rank0(model.is_dir()):
        return str(model)
    if reason := layout.damage(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} cannot be read: {reason}.")
    with distributed.together():
        if not distributed.is_rank0():
            return str(model)
        try:
            with FileLock(checkpoint / ".lock"):  # the second of two commands waits
                if not model.is_dir():
                    export(checkpoint, config)
                    print(f"the checkpoint {checkpoint} is exported to {model}", flush=True)
        except OSError as error:
            reason = gist(error)
            raise UserError(
                f"no model can be written into the checkpoint {checkpoint}: {reason}."
            ) from None
    return str(model)
