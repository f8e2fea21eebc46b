"""A plain copy of a sharded language model to sample from, and its products on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from common import distributed
from common.config import CommonConfig
from common.model import fsdp


class RolloutCopy:
    """A plain replica of a sharded language model, filled once per rollout phase.

    Sampling from the sharded model would gather every unit once per token and tie the ranks to
    the same number of tokens. The replica costs one gather, holds the compute dtype, lets each
    rank stop when its own samples have stopped, and is freed before training goes on. Adapters are
    merged into its weights.
    """

    def __init__(self, lm: Any, config: CommonConfig) -> None:
        """Build the replica without storage. `lm` is the Hugging Face model inside the policy."""
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        with torch.device("meta"):
            self.replica = type(lm)(lm.config).to(dtype).eval().requires_grad_(False)
        fsdp.prepare(self.replica, config)
        self.source = lm
        for name, buffer in lm.named_buffers():
            parent, _, leaf = name.rpartition(".")
            self.replica.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)

    @contextmanager
    def gathered(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Fill the replica from `policy`, whose submodule the source is. Collective on entry."""
        fsdp.reshard(policy)
        whole = whole_weights(self.source)
        set_parameters(self.replica, lambda name, target: whole(name, target.dtype))
        head = self.replica.get_output_embeddings()
        shared = head.weight
        head.weight = nn.Parameter(shared.float(), requires_grad=False)  # cast once, not per token
        try:
            yield self.replica
        finally:
            head.weight = shared
            set_parameters(self.replica, lambda _, p: torch.empty_like(p, device="meta"))


def whole_weights(lm: nn.Module) -> Callable[[str, torch.dtype], torch.Tensor]:
    """What gathers one parameter, by its name in the plain model, with its adapters merged.

    Each call is collective. `lm` is the Hugging Face model inside a sharded policy.
    """
    from common.model import lora

    weights = {lora.plain_name(name): p for name, p in lm.named_parameters()}
    adapted = lora.adapted_layers(lm)

    def whole(name: str, dtype: torch.dtype) -> torch.Tensor:
        layer = adapted.get(name.removesuffix(".weight"))
        if layer is None:
            return gather(weights[name], dtype)
        matrices = (layer.lora_A[lora.TRAINED].weight, layer.lora_B[lora.TRAINED].weight)
        parts = [gather(part, torch.float32) for part in (weights[name], *matrices)]
        return lora.merged_weight(layer, *parts).to(dtype)

    return whole


def gather(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter in a dtype, whole on every rank. Collective."""
    weight = parameter.data.to(distributed.device(), dtype)  # cast first: half the traffic
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def set_parameters(module: nn.Module, value: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Replace every parameter by a frozen one; one that is shared (tied embeddings) stays so."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if old not in new:
            new[old] = nn.Parameter(value(name, old), requires_grad=False)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new[old])


class PackedLinear(nn.Module):
    """A linear layer of a frozen model on a CPU, its weight in the order in which oneDNN reads it.

    A product of a few rows with a matrix is otherwise mostly the reordering of the matrix: with 8
    rows this is 1.7 times as fast, with 64 rows 1.3 times (float32, AVX-512).
    """

    ROWS = 64  # the layout suits any number of rows above one

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        """Take the place of a layer whose weight is there."""
        super().__init__()
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight  # (out, in)
        self.bias = None if layer.bias is None else layer.bias.to(weight.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`, in the dtype of the weight."""
        inputs = inputs.to(self.packed.dtype)
        linear = torch.ops.mkldnn._linear_pointwise
        output: torch.Tensor = linear(inputs, self.packed, self.bias, "none", [], "")
        return output


@contextmanager
def packed(lm: nn.Module) -> Iterator[None]:
    """Compute with packed weights inside; nothing where oneDNN is not at hand, as on a GPU.

    The weights that were packed are given up, so that there is one copy; embeddings keep theirs.
    """
    is_bfloat16 = any(p.dtype == torch.bfloat16 for p in lm.parameters())
    has_kernels = (
        distributed.device().type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (not is_bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
    layers = [
        (part, name, layer)
        for part in (lm.modules() if has_kernels else ())
        for name, layer in part.named_children()
        if type(layer) in (nn.Linear, Conv1D, fsdp.Float32Head)
    ]
    try:
        for part, name, layer in layers:
            setattr(part, name, PackedLinear(layer))
            given_up: Any = layer.weight.new_empty(0, device="meta")  # type: ignore[operator]
            layer.weight = nn.Parameter(given_up, requires_grad=False)
        yield
    finally:
        for part, name, layer in layers:
            setattr(part, name, layer)
