"""Sharding with FSDP2: which modules become units, in which precision, and where they lie.

Parameters, optimiser state and gradient reduction are float32. With `bf16` FSDP gathers bfloat16
copies of the parameters and computes with them; a frozen model is held in bfloat16.
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
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from common import distributed
from common.config import CommonConfig
from common.model.projection import exact_tf32

M = TypeVar("M", bound=nn.Module)


class Float32Head(nn.Linear):
    """The projection onto the vocabulary, computed in float32 from whatever it is given.

    GPT-2's logits lie near -100, where neighbouring bfloat16 numbers are 0.5 nats apart; a cast
    after the projection is too late.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., V), float32, of hidden states (..., D)."""
        bias = None if self.bias is None else self.bias.float()
        with exact_tf32(hidden):
            return nn.functional.linear(hidden.float(), self.weight.float(), bias)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated decoder blocks inside `module`, wherever the language model sits in it.

    Hugging Face models name their block classes; of others it is the largest `nn.ModuleList`.
    """
    named = [getattr(part, "_no_split_modules", None) or () for part in module.modules()]
    names = {name for found in named for name in found}
    found = [part for part in module.modules() if type(part).__name__ in names]
    if found:
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    sizes = [sum(p.numel() for p in part.parameters()) for part in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def inside_blocks(module: nn.Module) -> set[nn.Module]:
    """Every part of the decoder blocks inside `module`."""
    return {part for block in blocks(module) for part in block.modules()}


def shard(
    module: M,  # real weights on rank 0; elsewhere the same module on the meta device
    config: CommonConfig,
    mesh: DeviceMesh,  # 1-D, or (replicate, shard) for HSDP
    *,
    float32_modules: Sequence[nn.Module] = (),  # also under bf16, as a reward head: else scores tie
    moves: bool = False,  # though frozen: a mean in bfloat16 would lose what is added to it
) -> M:
    """Shard `module` in place and give every rank its part of rank 0's weights. Collective.

    Every block becomes a unit of its own, and the rest the root unit; it stays plain where there is
    nothing to shard: in one process that neither casts nor offloads. Only rank 0 ever holds the
    whole model.
    """
    device = distributed.device()
    lm = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if lm is not None:
        prepare(lm, config)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(lm)
    set_mode(module, config)
    if config.compile:
        # Blocks share their code: with and without gradient, cache or padding, first and last ones
        # are more than the default of 8 variants. None of them depends on a batch.
        torch._dynamo.config.recompile_limit = 32
        for block in blocks(module):
            block.compile(dynamic=True)
    trains = any(p.requires_grad for p in module.parameters())
    offloads = config.cpu_offload or (config.offload_frozen and not trains and not moves)
    if distributed.world_size() == 1 and not config.bf16 and not offloads:
        return module.to(device)  # nothing to shard, to cast or to offload
    if config.bf16 and not moves:
        hold_in_bfloat16(module, float32_modules)

    full_state = module.state_dict() if distributed.is_rank0() else {}
    make_units(module, config, mesh, float32_modules, offloads=offloads)
    if not distributed.is_rank0():
        module.to_empty(device="cpu" if offloads else device)
    set_model_state_dict(
        module,
        full_state,
        # strict=False: a tied lm_head has no entry of its own
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
    share_buffers(module, device)
    for unit in fsdp_units(module):
        # Losses are divided by global counts before backward, so ranks sum gradients: FSDP's own
        # division by the number of ranks is undone here and nowhere else.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # or gloo is asked for NCCL's PREMUL_SUM
    return module


def hold_in_bfloat16(module: nn.Module, float32_modules: Sequence[nn.Module]) -> None:
    """Round frozen parameters once, and not whenever they are gathered. Collective.

    That halves them, and no product changes. But adapters are merged into the weights that a base
    is held in: one that bfloat16 would take bits from, as if it is float32 on disk, stays float32.
    """
    kept = {p for part in float32_modules for p in part.parameters()}
    named = [(name, p) for name, p in module.named_parameters() if p not in kept]
    frozen = [p for name, p in named if not p.requires_grad and ".lora_" not in name]
    is_base = any(p.requires_grad for p in module.parameters())
    if frozen and is_base:
        loses = distributed.is_rank0() and any((p != p.bfloat16()).any() for p in frozen)
        if distributed.from_rank0(loses):
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
    """Turn every block, every float32 module and the rest into FSDP units."""
    offload = OffloadPolicy()
    if offloads:  # pinning speeds up copies to a GPU, and fails on a machine without one
        offload = CPUOffloadPolicy(pin_memory=distributed.device().type != "cpu")
    compute_dtype = torch.bfloat16 if config.bf16 else None
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    single = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    for part in float32_modules:
        fully_shard(part, mp_policy=single, **options)
    # A frozen model has no backward that would free its units, so its forward does.
    trains = any(p.requires_grad for p in module.parameters())
    keep = options | {"reshard_after_forward": config.reshard_after_forward or not trains}
    for block in blocks(module):
        fully_shard(block, mp_policy=precision, **keep)
    prefetch(blocks(module), config.prefetch_blocks)
    fully_shard(
        module, mp_policy=precision, reshard_after_forward=None if trains else True, **options
    )


def prefetch(blocks: Sequence[nn.Module], num_ahead: int) -> None:
    """Gather the next blocks' weights while a block computes, in both directions."""
    if num_ahead == 0:
        return  # FSDP's own order: one ahead in backward
    units: list[Any] = list(blocks)  # FSDP units by now
    for i, block in enumerate(units):
        block.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + num_ahead])
        block.set_modules_to_backward_prefetch(units[max(0, i - num_ahead) : i][::-1])


def prepare(lm: PreTrainedModel, config: CommonConfig) -> None:
    """Swap parts of a Hugging Face model for ones that compute the same, better or faster."""
    project_in_float32(lm)
    fuse_gelu(lm)
    from common.model import shared_prefix

    if config.layout == "shared_prefix":
        shared_prefix.use_shared_prefix(lm, (blocks(lm) or [lm])[-1])
    elif lm.config._attn_implementation == "sdpa":
        shared_prefix.replace_attention(lm)


def set_mode(module: nn.Module, config: CommonConfig) -> None:
    """Evaluation mode, since the other one brings noise of many names: `layerdrop`, `jitter`.

    Only to recompute activations must Hugging Face's blocks be told that they train; of a model
    without such blocks, all of it.
    """
    module.eval()
    if config.gradient_checkpointing and any(p.requires_grad for p in module.parameters()):
        layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
        for layer in layers:
            layer.training = True
        if not layers:
            module.train()


def fuse_gelu(lm: nn.Module) -> None:
    """Compute GPT-2's GELU, eight operations on tensors of 4 D numbers a token, in one."""
    for part in list(lm.modules()):
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, nn.GELU(approximate="tanh"))


def project_in_float32(lm: PreTrainedModel) -> None:
    """Give a language model float32 logits, also under bfloat16; others have no such head."""
    head = lm.get_output_embeddings()
    if type(head) is nn.Linear:
        head.__class__ = Float32Head


def enable_gradient_checkpointing(lm: PreTrainedModel) -> None:
    """Recompute every block in backward, through the language model's own switch."""
    old_name: Any = lm.gradient_checkpointing_enable  # warns from transformers 5.23 on
    getattr(lm, "activation_checkpointing_enable", old_name)({"use_reentrant": False})


def share_buffers(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's buffers: rotary tables are in no state dict. Collective."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            shared = buffer.to(device) if buffer.device != device else buffer
            dist.broadcast(shared, 0)
            part.register_buffer(
                name, shared, persistent=name not in part._non_persistent_buffers_set
            )


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit inside `module`, the root included."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def reduce_gradients_in_next_backward(
    module: nn.Module, is_last: bool, shards: bool = False
) -> None:
    """Reduce gradients over ranks in a step's last backward, and keep them whole until then.

    With `shards` every backward reduces them inside a group of shards, and adds a rank's part to
    what it holds; the groups of HSDP are summed in the last one only.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or shards)
        module.set_requires_all_reduce(is_last)


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Compute in float32 inside, also under bf16: the precision of what is exported.

    FSDP2 has no public switch for a unit's precision (torch 2.13, `FSDPState`); what a unit has
    allocated in the other one is made anew.
    """
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
    """Free what a forward without backward left gathered, so that parameters are shards again."""
    for part in fsdp_units(module):
        part.reshard()


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state on rank 0, on the host; empty elsewhere. Collective."""
    reshard(module)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(module, options=options)
    return state
