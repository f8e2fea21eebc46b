"""What a checkpoint holds of a run: shards, taken from the sharded modules and put back there."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from common import distributed
from common.checkpoint import files
from common.config import UserError, gist
from common.model import lora

State = dict[str, Any]


def restore_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None = None,
) -> State:
    """Load a checkpoint's shards in place; returns its manifest. Collective.

    Args:
        folder: of a whole checkpoint.
        model: sharded.
        optimizer: of the model; its learning rate, betas and weight decay stay as they are.
        reference: sharded, if it is in the checkpoint.

    Raises:
        UserError: the checkpoint has a reference and there is none here, or the reverse; or it has
            other adapters, or does not fit the model.
    """
    manifest: State = distributed.from_rank0(
        files.read_manifest(folder) if distributed.is_rank0() else None
    )
    if manifest["has_reference"] != (reference is not None):
        has = "no updated" if reference is not None else "an updated"
        raise UserError(
            f"the checkpoint {folder} has {has} reference; give the --ref_update_steps of its run."
        )
    was, now = manifest["adapters"], lora.description(model)
    if was != now:
        raise UserError(
            f"the checkpoint {folder} has the adapters {was}, and this run has {now}; give the "
            "flags of its run."
        )
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = trained_state(model, optimizer)
    if reference is not None:
        state["reference"] = reference_state(reference)
    try:
        load_shards(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise UserError(
            f"the checkpoint {folder} does not fit the model: {first_cause(error)}."
        ) from None
    groups = get_state_dict(model, optimizer)[1]["param_groups"]
    options = StateDictOptions(strict=False)  # frozen parameters are as they were read
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
        options=options,
    )
    if reference is not None:
        set_model_state_dict(reference, state["reference"], options=options)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    return manifest


def restore_parameters(folder: Path, model: nn.Module) -> None:
    """Load what a checkpoint has of the model only, in place, to look at a run's past. Collective.

    Args:
        folder: of a whole checkpoint.
        model: of the run's architecture, sharded over any number of ranks.

    Raises:
        UserError: the checkpoint is damaged, has adapters, or does not fit the model.
    """
    if reason := files.damage(folder):
        raise UserError(f"the checkpoint {folder} cannot be read: {reason}.")
    if files.read_manifest(folder)["adapters"]:
        raise UserError(
            f"the checkpoint {folder} holds adapters alone; only one of a run with --lora_r 0 can "
            "be measured by itself."
        )
    state = {"model": once_each(model, get_model_state_dict(model))}
    try:
        load_shards(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise UserError(
            f"the checkpoint {folder} does not fit the model: {first_cause(error)}."
        ) from None
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))


def first_cause(error: CheckpointException) -> str:
    """Why a checkpoint could not be read, of the first rank that says so."""
    return gist(next(iter(error.failures.values()))[0])


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What training changes: the shards of model and optimiser, but for frozen parameters."""
    is_new = not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if is_new:  # what torch filled in for us has counted a step
        for values in optimizer.state.values():
            values["step"].zero_()
    frozen = {n for n, p in every_name(model).items() if not p.requires_grad}
    trained = {n: value for n, value in once_each(model, model_state).items() if n not in frozen}
    return {"model": trained, "optimizer": optimizer_state["state"]}


def every_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module, a tied one by both of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def once_each(module: nn.Module, state: State) -> State:
    """A module's state with a tied parameter under the first of its names only."""
    second_names = every_name(module).keys() - dict(module.named_parameters()).keys()
    return {name: value for name, value in state.items() if name not in second_names}


def reference_state(reference: nn.Module) -> State:
    """The shards of a reference that changes: of one inside the policy its adapter only."""
    state: State = get_model_state_dict(reference)
    if isinstance(reference, lora.AdapterReference):
        return {k: v for k, v in state.items() if lora.belongs_to(k, lora.REFERENCE)}
    return once_each(reference, state)
