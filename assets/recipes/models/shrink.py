"""A tiny model of any type: its default config shrunk by the names of its fields, random weights.

Weights are wide, and biases and norms are off their initial values, so that a wrong mask, position
or scale moves log-probabilities by nats.
"""

import re
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from common.text import synthetic

SHAPES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
VOCAB_SIZE = 300
MAX_LOGIT = 30.0  # as of pretrained models


def types() -> list[str]:
    """Every model type that transformers maps to a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def not_a_decoder(model_type: str) -> str:
    """Why a causal type of transformers is no decoder by itself; empty if it is one."""
    if model_type.endswith("_assistant"):
        return "a drafter, which reads the hidden states of another model"
    default = AutoConfig.for_model(model_type)
    if default.is_encoder_decoder:
        return "the decoder of an encoder-decoder"
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "an encoder"
    if any(re.search("text|vision|audio|vq", name) for name in default.sub_configs):
        return "text with pictures or sound"
    return ""


def tiny_config(model_type: str) -> Any:
    """The type's default config with few and narrow layers, one of each kind that it has."""
    fields = shrunk(AutoConfig.for_model(model_type).to_dict())
    return AutoConfig.for_model(model_type, **(fields | SHAPES["exceptions"].get(model_type, {})))


def shrunk(default: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that become smaller, with their new values."""
    fields = {name: smaller(name, value) for name, value in default.items()}
    fields = {name: value for name, value in fields.items() if value != default[name]}
    heads, key_heads = default.get("num_attention_heads"), default.get("num_key_value_heads")
    if heads and key_heads in (1, heads):  # one for all, or no groups
        fields["num_key_value_heads"] = 1 if key_heads == 1 else fields["num_attention_heads"]
    if default.get("head_dim") == default.get("qk_rope_head_dim", 0):
        fields["head_dim"] = fields["qk_rope_head_dim"]
    number = default.get("num_hidden_layers")
    lists = {k: v for k, v in default.items() if isinstance(v, list) and len(v) == number}
    if lists:
        kinds = list(zip(*lists.values(), strict=True))  # of each layer
        layers = sorted({1, *map(kinds.index, kinds)})  # the first of each kind
        fields |= {name: [value[layer] for layer in layers] for name, value in lists.items()}
        fields["num_hidden_layers"] = len(layers)
    return fields


def smaller(name: str, value: Any) -> Any:
    """The value of a field in a tiny model."""
    if isinstance(value, dict) and "model_type" in value:
        return shrunk(value)
    is_id = name.endswith(("token_id", "vocab_size"))
    if type(value) is not int and not (is_id and isinstance(value, list)):
        return value
    sizes = (size for names, size in SHAPES["sizes"].items() if re.fullmatch(names, name))
    size = next(sizes, value)
    return size if is_id else min(size, value)


def save(model_type: str, folder: Path, seed: int = 0) -> None:
    """Write a tiny model of the type with random weights and a tokenizer."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    randomise(lm, seed)
    lm.save_pretrained(folder)
    synthetic.train_tokenizer(VOCAB_SIZE).save_pretrained(folder)


@torch.no_grad()
def randomise(lm: Any, seed: int) -> None:
    """Draw wide weights, with which the largest logit of random tokens is about `MAX_LOGIT`.

    A tied embedding is small compared with what the layers add to it, or the model repeats its last
    token.
    """
    generator, head = torch.Generator().manual_seed(seed), lm.get_output_embeddings()
    is_tied = head.weight is lm.get_input_embeddings().weight
    for parameter in lm.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        scale *= 4 if is_tied and parameter is not head.weight else 1
        parameter += scale * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(2, VOCAB_SIZE, (8, 12), generator=generator)
    for _ in range(4):  # a tied head is the embedding, on which the hidden states depend too
        largest = float(lm(input_ids=ids, use_cache=False).logits.abs().max())
        head.weight *= min(4.0, max(0.25, MAX_LOGIT / largest))
