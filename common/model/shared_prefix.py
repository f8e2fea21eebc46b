"""A prompt computed once for all its completions: the attention function given to a model.

transformers lets any decoder call an attention function by name. The one registered here takes the
`Layout` of a batch or the cache of a sampler; without either it is the usual `sdpa`. The model has
applied positions (learned or rotary) before. The attention itself is in `shared_attention`.
"""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.batch import Layout
from common.errors import UserError
from common.model.shared_attention import branch_attention

NAME = "shared_prefix"
# Names of a block's norm before attention, and of its attention
PRE_ATTENTION = (
    ("ln_1", "attn"),
    ("input_layernorm", "self_attn"),
    ("input_layernorm", "attention"),
)
NO_MASK = (1, 1, 1, 1)  # shape of a mask that is not read
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")  # options of attention functions


def use_shared_prefix(lm: PreTrainedModel, last_block: nn.Module) -> None:
    """Let a model take a `layout`, in place; without one it computes what it did before.

    A UserError if the model's attention cannot be replaced.
    """
    # Llama 4, whose layers attend to chunks, has no `base_model`.
    # Convolutions and recurrent states would run from one completion into the next.
    # BLT has several stacks of layers, and no number of them.
    is_stack = hasattr(lm.config, "num_hidden_layers")
    layers = DynamicCache(config=lm.config).layers if is_stack else []
    is_hybrid = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    if lm.base_model is lm or not layers or is_hybrid or not replace_attention(lm):
        raise UserError(
            f"{type(lm).__name__} has an attention of its own, which cannot be planned and cannot "
            "share a prompt; to train it use --layout padded."
        )
    if any(hasattr(last_block, n) and hasattr(last_block, a) for n, a in PRE_ATTENTION):
        kind: Any = type(last_block)
        last_block.__class__ = shortened(kind, type(lm).__name__)


def replace_attention(lm: PreTrainedModel) -> bool:
    """Let a model call `attend` and `mask`; False if its own attention cannot be replaced."""
    # A model without sdpa has attention sinks, caps its scores or looks nothing up by name. Sparse
    # attention masks what its indexer left out only if the function's name is `sdpa` or `eager`
    # (transformers 5.23 `DeepseekV32Attention`); with any other it would attend to all tokens.
    is_sparse = any(type(module).__name__.endswith("Indexer") for module in lm.modules())
    is_plain = getattr(lm, "_supports_attention_backend", False) and lm._supports_sdpa
    is_plain = is_plain and not is_sparse
    if is_plain:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask)
        lm.set_attn_implementation(NAME)
    return bool(is_plain)


def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """`sdpa_mask` without its shortcuts on a GPU, which look for padding and so wait for it."""
    if attention_mask is not None and attention_mask.device.type != "cpu":
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    result: Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **options)
    return result


def last_hidden_states(
    lm: Any,
    input_ids: Tensor,  # (B, T) int64
    position_ids: Tensor,  # (B, T) int64
    layout: "Layout | KeyCache",
) -> Tensor:
    """Run a decoder whose attention follows the layout: (B, T, D)."""
    assert lm.config._attn_implementation == NAME, "use_shared_prefix() comes first"
    hidden: Tensor = lm.base_model(
        input_ids=input_ids,
        position_ids=position_ids,
        layout=layout,
        # transformers passes a mask of four dimensions on, and builds none.
        attention_mask=torch.empty(NO_MASK),
        use_cache=False,
    ).last_hidden_state
    return hidden


class KeyCache(Protocol):
    """Keys and values that a sampler keeps; see `sampling.shared.DecodingCache`."""

    longest: int  # tokens of a prompt and its completion

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Store the keys and values of the next tokens; attention output of the queries."""


class LastLayer:
    """The layout of the last block, whose output is read at the tails only.

    `keys` are keys and values (1, H, T, d) of the whole row, once they are computed.
    """

    def __init__(self, layout: Layout) -> None:
        """Start without keys."""
        self.layout, self.longest = layout, layout.longest
        self.keys: tuple[Tensor, Tensor] | None = None


class ShortenedBlock(nn.Module):
    """A last block that computes keys and values of the whole row, all else at the tails.

    Its output elsewhere is not read, and is 0. This saves two thirds of a block for all tokens of a
    prompt but the last.
    """

    model_name: str  # of the model that the block is in

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """The block's hidden states (1, T, D); without a layout its usual output."""
        forward, layout = super().forward, options.get("layout")
        if not isinstance(layout, Layout) or hidden_states.dim() != 3:  # Gemma 3n has four streams
            output: Tensor = forward(hidden_states, *args, **options)
            return output
        last = LastLayer(layout)
        norm, attention = next(
            (getattr(self, n), getattr(self, a))
            for n, a in PRE_ATTENTION
            if hasattr(self, n) and hasattr(self, a)
        )
        attention(norm(hidden_states), **({"attention_mask": None} | options | {"layout": last}))
        if last.keys is None:
            raise UserError(f"{self.model_name} cannot share a prompt; use --layout padded.")
        length, tail = hidden_states.shape[1], layout.tail

        def at_tail(value: Any) -> Any:
            shape = [*value.shape[1:3]] if isinstance(value, Tensor) else []  # of (B, T, ..) or
            is_per_token = length in shape  # (B, 1, T, ..)
            return value.index_select(1 + shape.index(length), tail) if is_per_token else value

        tail_args, tail_options = tree_map(at_tail, (args, options | {"layout": last}))
        tail_output = forward(hidden_states[:, tail], *tail_args, **tail_options)
        return torch.zeros_like(hidden_states).index_copy(1, tail, tail_output)


@functools.cache
def shortened(block: Any, model_name: str) -> Any:
    """A subclass of `block` with the shortened forward, under the name by which `blocks` finds it.

    It is a class because a forward set on the block would hold a reference to it.
    """
    if issubclass(block, ShortenedBlock):
        return block
    return type(block.__name__, (ShortenedBlock, block), {"model_name": model_name})


def attend(
    module: nn.Module,  # the attention layer
    query: Tensor,  # (B, H, T, d)
    key: Tensor,  # (B, H', T, d), H' dividing H
    value: Tensor,  # (B, H', T, d)
    attention_mask: Tensor | None,  # ignored with a layout
    scaling: float | None = None,  # of the scores; default 1 / sqrt(d)
    layout: "Layout | LastLayer | KeyCache | None" = None,
    **options: Any,  # for `sdpa`
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: (B, T, H, d), and None for the weights."""
    if layout is None:
        if attention_mask is not None and attention_mask.shape == NO_MASK and query.shape[2] > 1:
            raise UserError(
                f"{type(module).__name__} is not given the options of its model, and cannot share "
                "a prompt; use --layout padded."
            )
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output, None
    return attend_by_layout(module, query, key, value, scaling, layout, options), None


def attend_by_layout(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    layout: "Layout | LastLayer | KeyCache",
    options: dict[str, Any],
) -> Tensor:
    """Attention output (B, T, H, d) under a layout; arguments as in `attend`."""
    refuse_unsupported(layout, options)
    if key.shape[-1] != value.shape[-1]:
        raise UserError("the model's values have another width than its keys; use --layout padded.")
    refuse_head_width(query)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(layout, Layout | LastLayer):
        output = layout.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore
        return output.transpose(1, 2)
    whole = layout.layout if isinstance(layout, LastLayer) else layout
    is_tail = isinstance(layout, LastLayer) and layout.keys is not None
    if whole.keys_by_layer is not None and not is_tail:
        whole.keys_by_layer[int(module.layer_idx)] = key, value  # type: ignore[arg-type]
    if isinstance(layout, LastLayer):
        if layout.keys is None:
            layout.keys = key, value  # the first of its two passes computes only these
            return query.new_zeros(()).expand(query.transpose(1, 2).shape)
        key, value = layout.keys
    return branch_attention(query, key, value, whole, is_tail, scaling).transpose(1, 2)


def refuse_head_width(query: Tensor) -> None:
    """Raise a UserError for heads (B, H, T, d) of a width that a GPU's attention does not take."""
    width, unit = query.shape[-1], 4 if query.dtype == torch.float32 else 8
    if query.is_cuda and width % unit:
        raise UserError(
            f"the model's heads are {width} wide, which attention on a GPU takes in multiples of "
            f"{unit}; use --layout padded."
        )


def refuse_unsupported(layout: "Layout | LastLayer | KeyCache", options: dict[str, Any]) -> None:
    """Raise a UserError for sliding windows shorter than the text, and for capped scores."""
    window = options.get("sliding_window")  # 0: none, as Qwen2-MoE writes it
    if window and layout.longest > window:
        raise UserError(
            f"the model's attention has a window of {window} tokens and a prompt with its "
            f"completion has {layout.longest}; use --layout padded."
        )
    unknown = [name for name in UNSUPPORTED if options.get(name) is not None]
    if unknown:
        raise UserError(f"the model's attention asks for {unknown[0]!r}; use --layout padded.")
