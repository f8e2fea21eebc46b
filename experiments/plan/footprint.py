"""What a model takes: numbers per parameter and bytes per token, counted on the meta device.

A model is built from its configuration alone, without a weight. What its autograd graph keeps for
backward is not guessed from a formula for one architecture: a pass over meta tensors is made, which
computes nothing, and the storages that autograd saves are added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.config.stages import TrainConfig
from common.errors import UserError, gist
from common.model import checks, fsdp, load, lora, shared_prefix
from common.model.checks import Kind
from common.record.flops import Decoder, linear_shapes

NUM_TOKENS = 128  # of the counted pass
Unit = list[nn.Parameter]  # that FSDP gathers together, on the meta device


def numbers(unit: Unit, ranks: int = 1, *, trained: bool = False) -> int:
    """Numbers, or trained ones, on the rank that holds most of those that share the unit.

    Each parameter is cut along its first dimension. FSDP fills the last part up to the size of the
    others, so that 768 rows on 1024 ranks take a row on each.
    """
    counted = (p for p in unit if p.requires_grad or not trained)
    return sum(-(-len(p) // ranks) * (p.numel() // len(p)) if p.ndim else 1 for p in counted)


@dataclass(frozen=True)
class Footprint(Decoder):
    """Sizes of a model. Bytes are those of a token in the compute dtype, in one block."""

    name: str  # of its class
    blocks: list[Unit]
    root: Unit  # embeddings, final norm, head
    width: int  # D
    key_width: int  # heads times the width of one, of keys: fewer heads with grouped queries
    mlp_width: int  # what the widest linear layer reads
    num_gates: int  # linear layers that make it: 2 in a gated MLP
    vocabulary: int
    is_tied: bool  # whether the projection onto the vocabulary is the embedding
    block_bytes: float  # kept for backward by a whole block
    keys_bytes: float  # of these, by what is before the attention
    outer_bytes: float  # kept for backward outside of the blocks
    kept_keys_bytes: float  # of the storages in which a forward leaves keys and values
    is_bfloat16: bool = False  # on disk, as its configuration says

    def numbers(self, ranks: int = 1, *, trained: bool = False) -> int:
        """Numbers on one of the ranks that share the model."""
        return sum(numbers(unit, ranks, trained=trained) for unit in (*self.blocks, self.root))

    @property
    def has_adapters(self) -> bool:
        """Whether only a part of it is trained."""
        return 0 < self.numbers(trained=True) < self.numbers()


def of_model(
    path: str,  # as `--model_name_or_path`
    kind: Kind,
    config: TrainConfig,
    *,
    trains: bool,  # False of a frozen model, which has no adapters
) -> Footprint:
    """The footprint of the model at a path, from its configuration only.

    A policy's folder gives the shape of a reward model and the reverse: the model itself may be
    trained later. A UserError says that there is none, or that its memory depends on the data.
    """
    tokenizer = None
    if path.endswith(".json") and config.tokenizer_name_or_path:  # then it sets the vocabulary
        tokenizer = load.load_tokenizer(config.tokenizer_name_or_path, config)
    is_bfloat16 = load.find_config(path, tokenizer, config).dtype == torch.bfloat16
    model_config = load.read_model_config(path, "trunk", tokenizer, config)
    held = (getattr(model_config, "architectures", None) or [""])[0]
    is_other = kind != "trunk" and held and checks.is_classifier(model_config) == (kind == "policy")
    auto_class = AutoModelForCausalLM
    if kind != "policy":
        model_config.num_labels, auto_class = 1, AutoModelForSequenceClassification
        checks.ensure_classifier(model_config)
    with torch.device("meta"):
        lm = auto_class.from_config(model_config, trust_remote_code=config.trust_remote_code)
    for name, parameter in lm.named_parameters():
        if parameter.ndim > 2:  # so that none of their matrices is a linear layer
            raise UserError(
                f"{type(lm).__name__} has experts ({name} of "
                f"{parameter.ndim} dimensions), whose memory depends on the data; only models of "
                "matrices and vectors can be planned."
            )
    if not trains:
        lm.requires_grad_(False)
    elif config.lora_r:
        lora.add_adapters(lm, path, config)
    name = type(lm).__name__ + (f" (of the shape of a {held})" if is_other else "")
    return replace(measure(lm, config), is_bfloat16=is_bfloat16, name=name)


def measure(lm: Any, config: TrainConfig) -> Footprint:
    """The footprint of a meta model, which is changed: prepared as for training, and cast.

    What a block keeps for backward is what comes between the attentions of the first and the last.
    """
    blocks = fsdp.blocks(lm)
    inside = {id(p) for block in blocks for p in block.parameters()}
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    vocabulary, width = embedding.weight.shape
    linear = [shape for block in blocks for shape in linear_shapes(block)]
    mlp_width = max(inputs for inputs, _ in linear)
    num_makers = sum(outputs == mlp_width for _, outputs in linear) // len(blocks)
    count = count_pass(lm, blocks, config)
    (query_width, key_width), steps = count.widths, len(count.before) - 1
    kept = count.num_bytes / NUM_TOKENS
    block = (count.before[-1] - count.before[0]) / NUM_TOKENS / steps if steps else kept
    return Footprint(
        name=type(lm).__name__,
        blocks=[list(block.parameters()) for block in blocks],
        root=[p for p in lm.parameters() if id(p) not in inside],
        num_layers=len(blocks),
        block_weights=sum(inputs * outputs for inputs, outputs in linear) / len(blocks),
        key_value_weights=2 * width * key_width,
        attention_width=query_width,
        head_weights=0 if head is None else head.weight.numel(),
        width=width,
        key_width=key_width,
        mlp_width=mlp_width,
        num_gates=min(2, max(1, num_makers)),
        vocabulary=vocabulary,
        is_tied=head is not None and head.weight is embedding.weight,
        block_bytes=block,
        keys_bytes=count.before[0] / NUM_TOKENS,
        outer_bytes=max(0.0, kept - len(count.before) * block),
        kept_keys_bytes=count.keys_storage / NUM_TOKENS,
    )


@dataclass
class Count:
    """The storages that a graph keeps, each once, and what was seen at each layer's attention."""

    parameters: set[int]  # storages that are not counted
    # By address, and held so that none is freed and its address used again.
    kept: dict[int, Any] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)  # bytes kept before each layer's attention
    widths: tuple[int, int] = (0, 0)  # heads times the width of one, of queries and of keys
    keys_storage: int = 0  # bytes of the storages that keys and values of a layer lie in

    longest = 1  # of a `KeyCache`: no window is exceeded

    @property
    def num_bytes(self) -> int:
        """Kept so far."""
        return sum(storage.nbytes() for storage in self.kept.values())

    def pack(self, tensor: Tensor) -> Tensor:
        """Called for every tensor that autograd saves."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.parameters:
            self.kept[storage._cdata] = storage
        return tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, _: float) -> Tensor:
        """In the place of fused attention: keep what that keeps for backward, compute nothing.

        Kept are queries, keys, values, the output, and a log-sum-exp per query and head.

        Returns:
            (1, H, T, d), in the memory order of fused attention.
        """
        self.before.append(self.num_bytes)
        self.widths = (query.shape[1] * query.shape[3], key.shape[1] * key.shape[3])
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in (key, value)}
        self.keys_storage = sum(storage.nbytes() for storage in storages.values())
        batch, num_heads, length, width = query.shape
        output = query.new_empty(batch, length, num_heads, width).transpose(1, 2)
        if query.requires_grad or key.requires_grad:
            self.pack(output.requires_grad_())
            lse = query.new_empty(batch, length, num_heads, dtype=torch.float32)
            for kept in (query, key, value, lse):
                self.pack(kept)
        return output


def count_pass(lm: Any, blocks: Sequence[nn.Module], config: TrainConfig) -> Count:
    """The storages that the graph of one forward pass keeps, in the compute dtype."""
    if config.bf16:
        lm.to(torch.bfloat16)
    fsdp.fuse_gelu(lm)
    shared_prefix.use_shared_prefix(lm, blocks[-1])
    lm.eval()
    parameters = {p.untyped_storage()._cdata for p in lm.parameters()}
    count = Count(parameters)
    ids, positions = torch.zeros(2, 1, NUM_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor):
            hidden = shared_prefix.last_hidden_states(lm, ids, positions, count)
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"what {type(lm).__name__} keeps depends on its data: {gist(error)}."
        ) from None
    del hidden  # alive until here: a freed storage's address might be used again
    return count
