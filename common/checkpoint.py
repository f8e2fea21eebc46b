"""Checkpoints to resume from, and exported models to use elsewhere.

A checkpoint is sharded (`torch.distributed.checkpoint`) and holds parameters, optimiser state, the
number of finished steps, and a reference that changes in the course of the run; row order and noise
are functions of the step, so nothing else is needed. An exported model is a plain `save_pretrained`
folder.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import PreTrainedTokenizerBase

from common import distributed, fsdp
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
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if reference is not None:
        fsdp.reshard(reference)
        state["reference"] = get_model_state_dict(reference)
    save_shards(state, checkpoint_id=partial)
    if distributed.is_rank0():
        contents = {"step": step, "has_reference": reference is not None}
        (partial / STEP_FILE).write_text(json.dumps(contents))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    distributed.barrier()


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
        UserError: the checkpoint has a reference and this run updates none, or the reverse.
    """
    contents = json.loads((folder / STEP_FILE).read_text())
    if contents.get("has_reference", False) != (reference is not None):
        has = "no updated" if reference is not None else "an updated"
        raise UserError(
            f"the checkpoint {folder} has {has} reference; give the --ref_update_steps of its run."
        )
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    if reference is not None:
        state["reference"] = get_model_state_dict(reference)
    load_shards(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    if reference is not None:
        set_model_state_dict(reference, state["reference"])
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
        if reward_shift and not fold_reward_shift(lm, state, reward_shift):
            lm.config.reward_shift = wrapper.shift + reward_shift  # it may have come with one
        if stop_ids and getattr(lm, "generation_config", None) is not None:
            lm.generation_config.eos_token_id = list(stop_ids)
            lm.generation_config.pad_token_id = tokenizer.pad_token_id
        lm.config.use_cache = True
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        lm.save_pretrained(partial, state_dict=state)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
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
