"""The language model in a model of text and images, which is trained alone."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from common.errors import UserError

# Types of causal language models. By name: looking a class up in transformers' mappings imports
# every model there is. BERT and its like are in both.
CAUSAL = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()


def config_of(whole: PretrainedConfig) -> PretrainedConfig | None:
    """The text model's configuration; None of a model of text alone."""
    text: Any = getattr(whole, "text_config", None)
    has_images = whole.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if not has_images or getattr(text, "model_type", "") not in CAUSAL:
        return None
    text._commit_hash = getattr(whole, "_commit_hash", None)
    text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)  # its own has no effect
    return text  # type: ignore[no-any-return]


def alone(path: str, whole: Any, auto_class: Any, text_config: PretrainedConfig) -> PreTrainedModel:
    """The language model of the whole as one of text.

    Asked for by its config in the folder of the whole, it would be random (transformers 5.23,
    findings/text_config.sh). A UserError if its logits are not those of the whole, as of Aya
    Vision, which leaves out the scale that Cohere's text model has.
    """
    model: PreTrainedModel = auto_class.from_config(text_config)
    try:
        model.base_model.load_state_dict(whole.get_decoder().base_model.state_dict())
        if own_head := model.get_output_embeddings():
            own_head.load_state_dict(whole.get_output_embeddings().state_dict())
    except (AttributeError, RuntimeError):  # its decoder or its head is named otherwise
        raise UserError(
            f"the text model of {path!r} cannot be taken out of the whole "
            f"{whole.config.model_type}; give a model of text."
        ) from None
    if own_head:
        ids = torch.arange(8)[None]
        with torch.no_grad():
            logits, expected = (each.eval()(input_ids=ids).logits for each in (model, whole))
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3):
            raise UserError(
                f"the text model of {path!r}, alone, gives other logits than the whole "
                f"{whole.config.model_type}; give a model of text."
            )
    model.generation_config = whole.generation_config
    return model
