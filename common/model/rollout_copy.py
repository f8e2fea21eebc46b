"""A plain copy of a sharded language model for sampling, with packed weights on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from common import distributed
from common.config.stages import CommonConfig
from common.model import fsdp, lora


class RolloutCopy:
    """A plain copy of a sharded language model, filled once per rollout phase.

    Sampling from the sharded model would gather every unit once per token, and every rank would
    have to sample the same number of tokens. The copy costs one gather and holds the compute dtype.
    Each rank stops when its samples have stopped. The copy is freed before training goes on, unless
    `is_kept` says that graphs read it: then it is filled in place. Adapters are merged into it.
    """

    is_kept = False  # the storage, behind the current `gathered`
    head: torch.Tensor | None = None  # the vocabulary head in float32

    def __init__(self, lm: Any, config: CommonConfig) -> None:
        """Build a copy of the policy's Hugging Face model `lm` without storage for its weights."""
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        with torch.device("meta"):
            self.lm = type(lm)(lm.config).to(dtype).eval().requires_grad_(False)
        fsdp.use_our_modules(self.lm, config)
        self.source = lm
        for name, buffer in lm.named_buffers():  # rotary tables, which are not parameters: shared
            parent, _, leaf = name.rpartition(".")
            self.lm.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)

    @contextmanager
    def gathered(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Fill the copy from `policy`, the module around the source. Collective on entry."""
        fsdp.reshard(policy)  # so that every parameter is a shard, which `whole` gathers
        whole = whole_weights(self.source)
        set_parameters(self.lm, lambda name, old: filled(old, whole(name, old.dtype)))
        head = self.lm.get_output_embeddings()
        shared = head.weight
        # Cast once, not per token
        self.head = shared.float() if self.head is None else filled(self.head, shared)
        head.weight = nn.Parameter(self.head, requires_grad=False)
        try:
            yield self.lm
        finally:
            head.weight = shared
            if not self.is_kept:
                self.head = None
                set_parameters(self.lm, lambda _, p: torch.empty_like(p, device="meta"))


def whole_weights(lm: nn.Module) -> Callable[[str, torch.dtype], torch.Tensor]:
    """A function that gathers a parameter by its name in the plain model, adapters merged.

    Each call is a collective. `lm` is the Hugging Face model inside a sharded policy.
    """
    weights = {lora.plain_name(name): p for name, p in lm.named_parameters()}
    adapted = lora.adapted_layers(lm)

    def whole(name: str, dtype: torch.dtype) -> torch.Tensor:
        layer = adapted.get(name.removesuffix(".weight"))
        if layer is None:
            return gather(weights[name], dtype)
        matrices = (layer.lora_A[lora.ADAPTER].weight, layer.lora_B[lora.ADAPTER].weight)
        weight, a, b = (gather(p, torch.float32) for p in (weights[name], *matrices))
        return lora.merged_weight(layer, weight, a, b).to(dtype)

    return whole


def gather(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather a whole parameter on every rank, in the dtype. Collective."""
    weight = parameter.data.to(distributed.device(), dtype)  # cast first: half the traffic
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def filled(old: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values, in the storage of the old tensor if it has one."""
    return values if old.is_meta else old.copy_(values)


def set_parameters(module: nn.Module, value: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Replace every parameter by a frozen one; tied parameters stay tied."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if old not in new:
            new[old] = nn.Parameter(value(name, old), requires_grad=False)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new[old])


class PackedLinear(nn.Module):
    """A linear layer of a frozen model on a CPU, its weight stored in oneDNN's order.

    Without it a product of a few rows spends most of its time on reordering the weight: with 8 rows
    this is 1.7 times as fast, with 64 rows 1.3 times (float32, AVX-512).
    """

    ROWS = 64  # the layout suits any number of rows above one

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        """Pack the weight of a layer."""
        super().__init__()
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight  # (out, in)
        self.bias = None if layer.bias is None else layer.bias.to(weight.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight (out, in), unpacked: sparse attention multiplies with it by itself."""
        weight: torch.Tensor = self.packed.to_dense()
        return weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`, in the dtype of the weight."""
        inputs = inputs.to(self.packed.dtype)
        linear = torch.ops.mkldnn._linear_pointwise
        output: torch.Tensor = linear(inputs, self.packed, self.bias, "none", [], "")
        return output


@contextmanager
def packed(lm: nn.Module) -> Iterator[None]:
    """Compute with packed weights inside the block, where oneDNN is available; not on a GPU.

    A packed layer releases its plain weight, so that there is one copy; embeddings keep theirs.
    """
    is_bfloat16 = any(p.dtype == torch.bfloat16 for p in lm.parameters())
    has_kernels = (
        distributed.device().type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (not is_bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
    layers = [
        (parent, name, layer)
        for parent in (lm.modules() if has_kernels else ())
        for name, layer in parent.named_children()
        if type(layer) in (nn.Linear, Conv1D, fsdp.Float32Head)
    ]
    try:
        for parent, name, layer in layers:
            setattr(parent, name, PackedLinear(layer))
            empty: Any = layer.weight.new_empty(0, device="meta")  # type: ignore[operator]
            layer.weight = nn.Parameter(empty, requires_grad=False)
        yield
    finally:
        for parent, name, layer in layers:
            setattr(parent, name, layer)
