"""The sharded state in a checkpoint: parameters, optimiser, and a reference that changes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from common import distributed
from common.checkpoint import hf_folder, layout
from common.errors import UserError, gist

State = dict[str, Any]
CODES = {dtype: code for code, dtype in _TYPES.items()}  # of safetensors
PARTLY = StateDictOptions(strict=False)  # frozen parameters are not in the state and stay


def restore_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None = None,
) -> State:
    """Load a whole checkpoint's shards in place; returns its manifest. Collective.

    Learning rate, betas and weight decay of the optimizer stay as they are. A UserError if the
    checkpoint is gone, or of another model.
    """
    try:
        manifest = layout.read_manifest(folder)
    except ValueError as error:  # it was removed since it was chosen
        raise UserError(f"the checkpoint {folder} cannot be read any more: {error}.") from None
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = trained_state(model, optimizer)
    if reference is not None:
        state["reference"] = whole_state(reference)
    try:
        load_shards(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        reason = cause(error)
        raise UserError(f"the checkpoint {folder} does not fit the model: {reason}.") from None
    groups = get_state_dict(model, optimizer)[1]["param_groups"]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
        options=PARTLY,
    )
    if reference is not None:
        set_model_state_dict(reference, state["reference"], options=PARTLY)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    return manifest


def cause(error: BaseException) -> str:
    """A short reason why writing or reading failed, of the first rank on which it did."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    first: Any = next(iter(failures.values()))[0] if failures else error
    if isinstance(first, OSError) and first.errno is not None:
        return os.strerror(first.errno)
    return gist(first)


class ShardWriter(HuggingFaceStorageWriter):
    """Writes tensor by tensor; torch's own writer holds two copies of the file in memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards as safetensors, with their offsets in the whole tensors."""
        items: list[Any] = plan.items
        header, offsets, end = {}, {}, 0
        for item in items:
            name, chunk = item.index.fqn, item.tensor_data.chunk
            dtype = item.tensor_data.properties.dtype  # float32, but for some models' buffers
            begin, end = end, end + dtype.itemsize * chunk.sizes.numel()
            header[name] = {
                "shape": [*chunk.sizes],
                "data_offsets": [begin, end],
                "dtype": CODES[dtype],
            }
            offsets[name] = {"saved_offsets": [*chunk.offsets]}
        text = json.dumps({**header, "__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets)}})
        text += " " * (-len(text) % 8)  # numbers start at a multiple of their size
        rank = distributed.rank() + 1
        path = Path(self.path, f"shard-{rank:05d}-model-00001-of-00001.safetensors")
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text.encode())
            for item in items:
                tensor: Any = planner.resolve_data(item)
                file.write(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
        layout.flush(path)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])  # our manifest describes the files on the disk
        return written


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Shards of model and optimiser, without frozen parameters."""
    is_new = not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if is_new:  # torch made a step to fill the empty state
        for values in optimizer.state.values():
            values["step"].zero_()
    every = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    trained = {
        n: value for n, value in hf_folder.once_each(model, model_state).items() if n not in frozen
    }
    return {"model": trained, "optimizer": optimizer_state["state"]}


def whole_state(reference: nn.Module) -> State:
    """The shards of a reference that changes."""
    return hf_folder.once_each(reference, get_model_state_dict(reference))
