"""Plain model folders of runs and checkpoints, which transformers, TRL and peft load.

A checkpoint also holds the settings of such a folder: its files other than weights. So a checkpoint
alone can be exported, and the result equals the run's exported model to the bit. Only adapters need
their base.
"""

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import yaml
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import custom_object_save

from common import distributed
from common.checkpoint import card, layout
from common.config.flags import ModelFlags, values_of
from common.config.stages import TrainConfig
from common.errors import UserError, gist
from common.model import checks, fsdp, load, lora
from common.record.run_folder import CONFIG
from common.text.example import Vocabulary

Config = TypeVar("Config", bound=ModelFlags)
NOT_MODELS = ("output_dir", "resume_from_checkpoint", "checkpoint")  # paths of other things
OF_MODEL = ("config.json", "generation_config.json")  # in the folder of whole weights only


# ---- settings: all files but weights -------------------------------------------------------------


def settings_of(
    lm: Any, vocabulary: Vocabulary, config: TrainConfig | None = None
) -> dict[str, bytes]:
    """Every file of a model's folder but its weights: contents by name.

    Of a model with adapters also peft's `adapter_config.json`, which `write_folders` puts into the
    adapter's folder. The vocabulary's stop ids become the generation config's eos ids, so that
    `generate` stops there. With the config of the run there is a model card.
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
        if settings := getattr(lm, "peft_config", {}).get(lora.TRAINED):
            settings = copy.copy(settings)
            settings.inference_mode = True  # as peft writes it
            settings.save_pretrained(name)
        vocabulary.tokenizer.save_pretrained(name)
        if config is not None:
            Path(name, "README.md").write_text(card.model_card(config), encoding="utf-8")
        return read_settings(Path(name))


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
    below: Callable[[], dict[str, Tensor]] = dict,
) -> None:
    """Write a model with its adapter merged, and the adapter as the folder `adapter` next to it.

    Of `lm` only the structure is read. `state` has the whole weights; base weights are moved out,
    so that none is held twice. `below` reads those that it lacks, once `adapter` is written.
    """
    if lora.adapted_layers(lm):
        with layout.replacing(folder.with_name("adapter")) as partial:
            lora.save_adapter(lm, state, partial)
            write_settings(settings, partial, without=OF_MODEL)
        state |= {name: tensor for name, tensor in below().items() if name not in state}
        state = lora.merged_state(lm, state)
    with layout.replacing(folder) as partial:
        # safetensors builds each file in memory
        lm.save_pretrained(partial, state_dict=state, max_shard_size="5GB")
        write_settings(settings, partial, without=[lora.SETTINGS_FILE])


def once_each(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A module's state with each tied parameter once, under the first of its names."""
    every = (name for name, _ in module.named_parameters(remove_duplicate=False))
    second_names = set(every) - {name for name, _ in module.named_parameters()}
    return {name: value for name, value in state.items() if name not in second_names}


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


# ---- checkpoints ---------------------------------------------------------------------------------


def export(checkpoint: Path, output_dir: Path, config: ModelFlags, base: str = "") -> None:
    """Write a checkpoint's `model`, its `adapter` if it has one, and the `config.yaml` of its run.

    Needs no process group, and memory for one copy of the weights. The checkpoint must be whole.
    `base` is the model under the adapters; empty: the run's.

    Raises:
        UserError: it lacks something, or the base of its adapters cannot be read; by then
            `adapter` is written.
    """
    manifest, folder = layout.read_manifest(checkpoint), checkpoint / layout.SETTINGS
    settings = read_settings(folder)
    model_config = load.find_config(str(folder), None, config)
    is_classifier = checks.is_classifier(model_config)
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    with torch.device("meta"):
        lm: Any = auto_class.from_config(model_config, trust_remote_code=config.trust_remote_code)
    state = read_weights(checkpoint)
    if manifest["adapters"]:
        from peft import LoraConfig

        of_adapter = LoraConfig.from_pretrained(str(folder))
        if not base:
            base, revision = manifest["adapters"]["model_name_or_path"], of_adapter.revision
            config = replace(config, model_name_or_path=base, model_revision=revision or "main")
        lora.inject(lm, of_adapter, lora.TRAINED)
        lm.peft_config = {lora.TRAINED: of_adapter}

    def below() -> dict[str, Tensor]:
        try:
            return read_base(base, folder, config, is_classifier=is_classifier)
        except UserError as error:
            raise UserError(
                f"{output_dir / 'adapter'} is written, and cannot be merged into a model without "
                f"its base: {error} Give that as --model_name_or_path."
            ) from None

    write_folders(lm, state, settings, output_dir / "model", below)
    flags = yaml.safe_dump(manifest["config"], sort_keys=False)
    (output_dir / CONFIG).write_text(flags, encoding="utf-8")


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
        tokenizer = load.load_tokenizer(str(settings), config, needs_eos=False)
        lm = load.load_reward_model(path, model_config, tokenizer, config)
    else:
        lm = load.load_policy(path, model_config, config)
    return once_each(lm, lm.state_dict())


def with_folders(config: Config) -> Config:
    """A config in which checkpoints named as models are their exported `model`. Collective.

    The checkpoint is exported once, into its folder, and the export is removed with it. The ranks
    check the shards together; rank 0 writes.

    Raises:
        UserError: a checkpoint is damaged, or cannot be exported.
    """
    paths = [f for f in fields(config) if f.metadata["is_path"] and f.name not in NOT_MODELS]
    names = dict.fromkeys(name for f in paths for name in values_of(config, f))
    checkpoints = [n for n in names if os.path.isfile(os.path.join(n, layout.MANIFEST))]
    folders = {name: exported(Path(name), config) for name in distributed.from_rank0(checkpoints)}
    changed: dict[str, Any] = {}
    for f in paths if folders else ():
        new = [folders.get(name, name) for name in values_of(config, f)]
        changed[f.name] = new if isinstance(getattr(config, f.name), list) else new[0]
    return replace(config, **changed)


def exported(checkpoint: Path, config: ModelFlags) -> str:
    """The folder `model` in a checkpoint, exported if it is missing. Collective."""
    model, failure = checkpoint / "model", ""
    if distributed.from_rank0(model.is_dir()):
        return str(model)
    if reason := layout.damage(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} cannot be read: {reason}.")
    if distributed.is_rank0():
        try:
            with FileLock(checkpoint / ".lock"):  # the second of two commands waits
                if not model.is_dir():
                    export(checkpoint, checkpoint, config)
                    print(f"the checkpoint {checkpoint} is exported to {model}", flush=True)
        except UserError as error:
            failure = str(error)
        except OSError as error:
            failure = f"no model can be written into the checkpoint {checkpoint}: {gist(error)}."
    if failure := distributed.from_rank0(failure):
        raise UserError(failure)
    return str(model)
