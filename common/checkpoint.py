"""Checkpoints to resume from, and exported models to use elsewhere.

A checkpoint is sharded (`torch.distributed.checkpoint`) and holds the trained parameters (under
LoRA: the adapters), optimiser state, the number of finished steps, and a reference that changes in
the course of the run; row order and noise are functions of the step, so nothing else is needed. An
exported model is a plain `save_pretrained` folder; of adapters there is peft's folder as well.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import PreTrainedTokenizerBase

from common import distributed, fsdp, lora
from common.config import UserError

STEP_FILE = "step.json"


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` finished steps is."""
    return output_dir / "checkpoints" / f"step_{step:08d}"


def save(
    output_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None = None,
) -> None:
    """Write the checkpoint after `step` finished steps; only a whole one has the name.

    Args:
        output_dir: of the run.
        step: finished steps.
        model: sharded.
        optimizer: of the model.
        reference: a sharded model that is not what the run started with any more.
    """
    folder = checkpoint_folder(output_dir, step)
    partial = folder.with_name(folder.name + ".partial")
    if distributed.is_rank0():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    distributed.barrier()
    fsdp.reshard(model)
    state = trained_state(model, optimizer)
    if reference is not None:
        fsdp.reshard(reference)
        state["reference"] = reference_state(reference)
    save_shards(state, checkpoint_id=partial)
    if distributed.is_rank0():
        contents = {
            "step": step,
            "has_reference": reference is not None,
            "adapters": lora.description(model),
        }
        (partial / STEP_FILE).write_text(json.dumps(contents))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    distributed.barrier()


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What training changes: the shards of model and optimiser, but for frozen parameters."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    parameters = model.named_parameters(remove_duplicate=False)  # a tied one by both of its names
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    trained = {name: value for name, value in model_state.items() if name not in frozen}
    return {"model": trained, "optimizer": optimizer_state}


def reference_state(reference: nn.Module) -> dict[str, Any]:
    """The shards of a reference that changes: of one inside the policy its adapter only."""
    state: dict[str, Any] = get_model_state_dict(reference)
    if isinstance(reference, lora.AdapterReference):
        return {k: v for k, v in state.items() if lora.belongs_to(k, lora.REFERENCE)}
    return state


def find(output_dir: Path, resume_from_checkpoint: str) -> Path | None:
    """The checkpoint a run resumes from: None for an empty name, or for `latest` without any.

    What is the latest is rank 0's to say. Collective.

    Raises:
        UserError: the folder is no whole checkpoint, or is not there on this machine.
    """
    if not resume_from_checkpoint:
        return None
    folder = Path(resume_from_checkpoint)
    if resume_from_checkpoint == "latest":
        whole = sorted((output_dir / "checkpoints").glob(f"step_*/{STEP_FILE}"))
        whole = [path for path in whole if not path.parent.name.endswith(".partial")]
        latest = distributed.from_rank0(whole[-1].parent if whole else None)
        if latest is None:
            distributed.print_rank0(f"no checkpoint in {output_dir} yet: starting at step 0")
            return None
        folder = latest
    if not (folder / STEP_FILE).is_file():
        raise UserError(f"--resume_from_checkpoint {folder} is not a whole checkpoint folder.")
    return folder


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None = None,
) -> int:
    """Load parameters and optimiser state in place; returns the finished steps. Collective.

    The number of ranks may differ from the one that saved. Learning rate, betas and weight decay
    stay those of this run's config.

    Args:
        folder: from `find`.
        model: sharded.
        optimizer: of the model.
        reference: as in `save`.

    Raises:
        UserError: the checkpoint has a reference and this run updates none, or the reverse; or it
            has other adapters.
    """
    contents = json.loads((folder / STEP_FILE).read_text())
    if contents.get("has_reference", False) != (reference is not None):
        has = "no updated" if reference is not None else "an updated"
        raise UserError(
            f"the checkpoint {folder} has {has} reference; give the --ref_update_steps of its run."
        )
    was, now = contents.get("adapters"), lora.description(model)
    if was != now:
        raise UserError(
            f"the checkpoint {folder} has the adapters {was}, and this run has {now}; give the "
            "flags of its run."
        )
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = trained_state(model, optimizer)
    if reference is not None:
        state["reference"] = reference_state(reference)
    load_shards(state, checkpoint_id=folder)
    options = StateDictOptions(strict=False)  # frozen parameters are as they were read
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    if reference is not None:
        set_model_state_dict(reference, state["reference"], options=options)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    return int(contents["step"])


def export(
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
    state = fsdp.full_state_dict(module)
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


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `folder` once it is whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


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
