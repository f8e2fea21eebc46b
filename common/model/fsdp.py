"""Sharding with FSDP2: units, precision, offloading, and the gathered state.

Parameters, optimiser state and gradient reduction are float32. With `bf16` FSDP gathers bfloat16
copies of the parameters and computes with them; a frozen model is held in bfloat16. One process
without offloading has no FSDP: `bfloat16.py` makes the copies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from common import distributed
from common.config.stages import CommonConfig
from common.model import shared_prefix
from common.model.bfloat16 import BFloat16Copies
from common.model.projection import exact_tf32

M = TypeVar("M", bound=nn.Module)


class Float32Head(nn.Linear):
    """The projection onto the vocabulary, computed in float32 from inputs of any dtype.

    GPT-2's logits lie near -100, where neighbouring bfloat16 numbers are 0.5 nats apart; a cast
    after the projection is too late.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., V), float32, of hidden states (..., D)."""
        bias = None if self.bias is None else self.bias.float()
        with exact_tf32(hidden):
            return nn.functional.linear(hidden.float(), self.weight.float(), bias)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated decoder blocks inside `module`, at any depth.

    Hugging Face models name their block classes; other models' blocks are the largest
    `nn.ModuleList`.
    """
    names: set[str] = set()
    for child in module.modules():
        names.update(getattr(child, "_no_split_modules", None) or ())
    named = [child for child in module.modules() if type(child).__name__ in names]
    if named:
        return named
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    return list(max(lists, key=lambda ls: sum(p.numel() for p in ls.parameters()), default=[]))


def inside_blocks(module: nn.Module) -> set[nn.Module]:
    """Every module in the decoder blocks of `module`."""
    return {child for block in blocks(module) for child in block.modules()}


def shard(
    module: M,  # real weights on rank 0; elsewhere the same module on the meta device
    config: CommonConfig,
    mesh: DeviceMesh,  # 1-D, or (replicate, shard) for HSDP
    *,
    float32_modules: Sequence[nn.Module] = (),  # also under bf16: a bfloat16 reward head gives ties
    moves: bool = False,  # a frozen running mean: in bfloat16 it would lose what is added to it
) -> M:
    """Shard `module` in place and give every rank its shards of rank 0's weights. Collective.

    Every block is an FSDP unit; everything outside of the blocks is the root unit. In one process
    that does not offload the module stays plain. Only rank 0 ever holds the whole model.
    """
    device = distributed.device()
    lm = next((child for child in module.modules() if isinstance(child, PreTrainedModel)), None)
    if lm is not None:
        untie_as_rank0(lm)
        use_our_modules(lm, config)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(lm)
    set_mode(module, config)
    if config.compile != "false":
        # Blocks share their code. Shapes of batches, with and without gradient, the last block and
        # the others make more variants than the default limit of 8.
        torch._dynamo.config.recompile_limit = 64
        for block in blocks(module):
            mode = "default" if config.compile == "true" else config.compile
            block.compile(dynamic=not config.has_fixed_shapes, mode=mode)
    trains = any(p.requires_grad for p in module.parameters())
    offloads = config.cpu_offload or (config.offload_frozen and not trains and not moves)
    if config.bf16 and not moves:
        hold_in_bfloat16(module, float32_modules)
    if distributed.world_size() == 1 and not offloads:
        module.to(device)
        if config.bf16:
            BFloat16Copies(module, float32_modules)
        return module

    full_state = module.state_dict() if distributed.is_rank0() else {}
    make_units(module, config, mesh, float32_modules, offloads=offloads)
    if not distributed.is_rank0():
        module.to_empty(device="cpu" if offloads else device)
    set_model_state_dict(
        module,
        full_state,
        # strict=False: a tied lm_head has no entry
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
    share_buffers(module, device)
    for unit in fsdp_units(module):
        # Losses are divided by global counts before backward, so ranks sum gradients: FSDP's own
        # division by the number of ranks is undone here and nowhere else.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # or gloo is asked for NCCL's PREMUL_SUM
    return module


def untie_as_rank0(lm: Any) -> None:
    """Give the head a separate matrix where rank 0 read one for it (`load`). Collective."""
    is_tied = getattr(lm.config, "tie_word_embeddings", False)
    if not distributed.from_rank0(is_tied) and is_tied:
        lm.config.tie_word_embeddings = False
        head = lm.get_output_embeddings()
        head.weight = nn.Parameter(torch.empty_like(head.weight), head.weight.requires_grad)


def hold_in_bfloat16(module: nn.Module, float32_modules: Sequence[nn.Module]) -> None:
    """Round frozen parameters once, and not whenever they are gathered. Collective.

    That halves their memory and changes no product. Adapters are merged into the base's weights as
    they are held, so a base under adapters that would lose bits (float32 on disk) stays float32.
    """
    excluded = {p for child in float32_modules for p in child.parameters()}
    named = [(name, p) for name, p in module.named_parameters() if p not in excluded]
    frozen = [p for name, p in named if not p.requires_grad and ".lora_" not in name]
    is_base = any(p.requires_grad for p in module.parameters())
    if frozen and is_base:
        loses_bits = distributed.is_rank0() and any((p != p.bfloat16()).any() for p in frozen)
        if distributed.from_rank0(loses_bits):
            return
    for parameter in frozen:
        parameter.data = parameter.data.bfloat16()


def make_units(
    module: nn.Module,
    config: CommonConfig,
    mesh: DeviceMesh,
    float32_modules: Sequence[nn.Module],
    *,
    offloads: bool,
) -> None:
    """Turn every block, every float32 module and the root into FSDP units."""
    offload = OffloadPolicy()
    if offloads:  # pinning speeds up copies to a GPU, and fails on a machine without one
        offload = CPUOffloadPolicy(pin_memory=distributed.device().type != "cpu")
    compute_dtype = torch.bfloat16 if config.bf16 else None
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    single = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    for child in float32_modules:
        fully_shard(child, mp_policy=single, **options)
    # A frozen model has no backward that would free its units, so its forward does.
    trains = any(p.requires_grad for p in module.parameters())
    reshard = config.reshard_after_forward or not trains
    for block in blocks(module):
        fully_shard(block, mp_policy=precision, reshard_after_forward=reshard, **options)
    fully_shard(
        module, mp_policy=precision, reshard_after_forward=None if trains else True, **options
    )


def use_our_modules(lm: PreTrainedModel, config: CommonConfig) -> None:
    """Replace a Hugging Face model's head, GELU and attention by this project's, in place."""
    head = lm.get_output_embeddings()
    if type(head) is nn.Linear:  # a classifier has none
        head.__class__ = Float32Head
    fuse_gelu(lm)

    if config.layout == "shared_prefix":
        shared_prefix.use_shared_prefix(lm, (blocks(lm) or [lm])[-1])
    elif lm.config._attn_implementation == "sdpa":
        shared_prefix.replace_attention(lm)


def set_mode(module: nn.Module, config: CommonConfig) -> None:
    """Set evaluation mode: training mode adds noise under many names (`layerdrop`, `jitter`).

    Exception: with gradient checkpointing Hugging Face's blocks recompute activations in training
    mode only. A model without such blocks is set to training mode as a whole.
    """
    module.eval()
    if config.gradient_checkpointing and any(p.requires_grad for p in module.parameters()):
        layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
        for layer in layers:
            layer.training = True
        if not layers:
            module.train()


def fuse_gelu(lm: nn.Module) -> None:
    """Compute GPT-2's GELU in one kernel, not in eight on tensors of 4 D numbers per token."""
    for parent in list(lm.modules()):
        for name, child in parent.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))


def enable_gradient_checkpointing(lm: PreTrainedModel) -> None:
    """Recompute every block in backward, by transformers' switch."""
    old_name: Any = lm.gradient_checkpointing_enable  # warns from transformers 5.23 on
    getattr(lm, "activation_checkpointing_enable", old_name)({"use_reentrant": False})


def share_buffers(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's buffers: rotary tables are in no state dict. Collective."""
    for child in module.modules():
        for name, buffer in list(child.named_buffers(recurse=False)):
            shared = buffer.to(device) if buffer.device != device else buffer
            dist.broadcast(shared, 0)
            is_persistent = name not in child._non_persistent_buffers_set
            child.register_buffer(name, shared, persistent=is_persistent)


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit inside `module`, the root included."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def reduce_gradients_in_next_backward(
    module: nn.Module, is_last: bool, shards: bool = False
) -> None:
    """Reduce gradients over ranks in an update's last backward; until then each rank holds all.

    With `shards` every backward reduces them inside a group of shards, and a rank accumulates its
    shard; HSDP's groups are summed in the last backward only.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or shards)
        module.set_requires_all_reduce(is_last)


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Compute in float32 inside the block, also under bf16: the precision of an exported model.

    FSDP2 has no public switch for a unit's precision (torch 2.13, `FSDPState`); buffers that a unit
    has allocated in the other precision are dropped.
    """
    copies: Any = getattr(module, "bfloat16_copies", None)
    if copies is not None:
        with copies.switched_off():
            yield
        return
    reshard(module)
    states: list[Any] = [unit._get_fsdp_state() for unit in fsdp_units(module)]
    before = [state._mp_policy for state in states]

    def use(policies: Sequence[MixedPrecisionPolicy]) -> None:
        for state, policy in zip(states, policies, strict=True):
            state._mp_policy = policy
            for group in state._fsdp_param_groups:
                group.mp_policy = policy
                for parameter in group.fsdp_params:
                    parameter.all_gather_outputs = []
                    vars(parameter).pop("_unsharded_param", None)
                group._init_mp_dtypes()

    use([MixedPrecisionPolicy(torch.float32, torch.float32)] * len(states))
    try:
        yield
    finally:
        reshard(module)
        use(before)


def reshard(module: nn.Module) -> None:
    """Free weights that a forward without backward left gathered: parameters are shards again."""
    for unit in fsdp_units(module):
        unit.reshard()


@torch.no_grad()
def mix_into(target: nn.Module, source: nn.Module, alpha: float) -> None:
    """Set target to alpha source + (1 - alpha) target, shard by shard, without communication.

    The target has the source's parameters and sharding.
    """
    reshard(target)
    reshard(source)
    for pair in zip(target.parameters(), source.parameters(), strict=True):
        old, new = (p.to_local() if isinstance(p, DTensor) else p for p in pair)
        old.lerp_(new, alpha)


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state on rank 0, on the host; empty elsewhere. Collective."""
    reshard(module)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(module, options=options)
    return state
