"""Checks of a model's folder and configuration before its weights are read."""

import copy
import difflib
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils.hub import cached_file

from common.config.stages import CommonConfig
from common.errors import UserError, gist, why_missing
from common.model.text_part import CAUSAL
from common.record.run_folder import MANIFEST
from common.text import sources

Kind = Literal["policy", "reward_model", "trunk"]
# What a forward pass returns, by which its output is read
RETURNED = {
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
}
ALWAYS_INSTALLED = (None, "eager", "sdpa")  # attention
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CONVERTED = ("rope_scaling", "rope_theta", "torch_dtype")  # fields that transformers renames
# Fields that transformers has written itself, and has not read for long
WRITTEN_BEFORE = {
    "_attn_implementation_autoset",
    "_model_name_or_path",
    "add_cross_attention",
    "auto_map",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "is_decoder",
    "model_name_or_path",
    "n_ctx",
    "output_past",
    "output_router_logits",
    "prefix",
    "pretraining_tp",
    "pruned_heads",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torchscript",
    "use_bfloat16",
}
LABELS = {"num_labels", "id2label", "label2id"}  # fields that say how many a classifier has
IN_LAYER = re.compile(r"\.\d+\.")  # in the name of a tensor
# Tensors of older files that no model reads any more: masks and angles, which it computes
BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$|position_ids$")


def refuse_unknown_fields(path: str, fields: dict[str, Any]) -> None:
    """Raise a UserError for a config with a misspelt field, which transformers ignores.

    A field that transformers converts, as `rope_theta`, or has written itself is not misspelt. A
    config that a tool saved (it has `transformers_version`) may have further fields, but none that
    looks like a misspelling.
    """
    if not isinstance(fields, dict):
        raise UserError(f"{path!r} has no fields of a model; it must be a JSON object.")
    default = AutoConfig.for_model(fields["model_type"])
    # What transformers converts is not stored under its old name
    unread = vars(AutoConfig.for_model(**fields)).keys() & fields.keys() - WRITTEN_BEFORE
    names = [*default.to_dict(), *default.attribute_map, *CONVERTED]
    for name in fields:
        if name not in unread or hasattr(default, name):
            continue
        close = difflib.get_close_matches(name, names, 1, cutoff=0.85)
        if close or "transformers_version" not in fields:
            advice = f"; perhaps {close[0]!r} is meant" if close else ""
            raise UserError(f"{path!r} has {name!r}, which no {default.model_type} has{advice}.")


def drop_leftovers(path: str, model_config: PretrainedConfig) -> PretrainedConfig:
    """Undo what other tools save in a config, and in those inside it; returns the same config.

    What a forward pass returns is what this project reads. Kernels are those that are installed
    here. An id of no token, as -1, is None: as padding it would be that of the last token. A
    UserError for an id that is no whole number.
    """
    classes = getattr(model_config, "architectures", None) or []
    listed = [classes] if isinstance(classes, str) else classes
    model_config.architectures = [name for name in listed if isinstance(name, str)] or None
    for name, value in RETURNED.items():
        if hasattr(model_config, name):
            setattr(model_config, name, value)
    if getattr(model_config, "_attn_implementation", None) not in ALWAYS_INSTALLED:
        model_config._attn_implementation = None
    if getattr(model_config, "_experts_implementation", None) is not None:
        model_config._experts_implementation = None
    num_ids = getattr(model_config, "vocab_size", None) or math.inf
    for name in SPECIAL_IDS:
        if (ids := getattr(model_config, name, None)) is not None:
            kept = token_ids(ids, num_ids, f"{path}/config.json") or None
            setattr(model_config, name, kept if kept is None or isinstance(ids, list) else kept[0])
    for name in getattr(model_config, "sub_configs", ()):
        if (inside := getattr(model_config, name, None)) is not None:
            drop_leftovers(path, inside)
    return model_config


def token_ids(ids: Any, num_ids: float, file: str) -> list[int]:
    """The tokens that a field of special ids names: none, one or a list of them.

    Ids that no token has stand for none. A UserError for what is no whole number.
    """
    listed = [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    for i in listed:
        if isinstance(i, bool) or not isinstance(i, int | float) or i % 1:
            raise UserError(f"{file} has {i!r} as a token's id, which must be a whole number.")
    return [int(i) for i in listed if 0 <= i < num_ids]


def check_vocabulary(
    path: str, model_config: PretrainedConfig, kind: Kind, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise a UserError for fewer embeddings than tokens."""
    # A reward model's pad token is added to the embedding later.
    pad_token = tokenizer.pad_token if kind in ("reward_model", "trunk") else None
    num_ids = count_ids(tokenizer, without=pad_token)
    if num_ids > model_config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens with ids up to {num_ids - 1} but {path!r} "
            f"has embeddings for {model_config.vocab_size}."
        )


def count_ids(tokenizer: PreTrainedTokenizerBase, without: str | None = None) -> int:
    """Rows of an embedding that holds all the tokenizer's ids, which may have gaps."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return 1 + max((i for token, i in vocabulary.items() if token != without), default=-1)


def reason(error: Exception) -> str:
    """Why a folder cannot be used, in our flags where transformers names its arguments."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, which only --trust_remote_code true runs"
    return gist(error)


def lacks(path: str, content: Literal["model", "tokenizer"]) -> bool:
    """Whether a path is a folder without the files of a model, or of a tokenizer."""
    folder = Path(path)
    patterns = ["config.json"] if content == "model" else ["tokenizer*", "vocab*", "*.model"]
    return folder.is_dir() and not any(file for name in patterns for file in folder.glob(name))


def check_location(path: str, content: Literal["model", "tokenizer"]) -> None:
    """Raise a UserError for a local path that does not exist, or lacks the content.

    An adapter's folder holds no model. For a possible hub id the hub is asked, once in a run,
    whether it answers.
    """
    folder = Path(path)
    if folder.is_dir():
        has_content = not lacks(path, content)
        # A checkpoint has the settings of its model and of its adapter in one folder.
        is_checkpoint = (folder.parent / MANIFEST).is_file()
        is_adapter = (folder / "adapter_config.json").is_file() and not is_checkpoint
        if is_adapter and (content == "model" or not has_content):
            raise UserError(
                f"the folder {path!r} holds an adapter and no model; merge it into its base first."
            )
        if not has_content:
            saved = [*folder.glob(f"step_*/{MANIFEST}"), *folder.glob(f"*/step_*/{MANIFEST}")]
            inside = f"; give a checkpoint in it, as {str(max(saved).parent)!r}" if saved else ""
            if (folder / "model").is_dir():
                inside = "; give its subfolder 'model'"
            raise UserError(f"the folder {path!r} holds no {content}{inside}.")
    elif folder.exists():
        return
    elif path.endswith(".json") or not sources.may_be_id(path):
        reason = why_missing(path) or f" {sources.NO_ID}"
        raise UserError(f"the folder {path!r} does not exist{reason}.")
    else:
        sources.is_reachable()


def check_head(path: str, model: Any, *, is_lost: bool = False) -> None:
    """Raise a UserError for a classifier with other layers than one projection.

    Or for a trained head that is lost, because the config does not name a classifier.
    """
    name = type(model).__name__
    if not hasattr(model, "score"):
        raise UserError(f"{path!r} ({name}) has no `score` head to use as reward.")
    if is_lost:
        raise UserError(
            f"the weights of {path!r} have a `score` head, but the architectures in its "
            f"config.json do not name {name}; correct them."
        )


def count_labels(path: str, revision: str, model_config: PretrainedConfig) -> None:
    """Set one label where config.json says no number, and the head in safetensors is (1, D).

    Without a number transformers takes 2, and it writes none for 2.
    """
    fields, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    if not is_classifier(model_config) or not LABELS.isdisjoint(fields):
        return

    def file_of(name: str) -> Any:  # None where there is none
        return cached_file(
            path, name, revision=revision, _raise_exceptions_for_missing_entries=False
        )

    names = {"model.safetensors"}
    if index := file_of("model.safetensors.index.json"):
        by_name = json.loads(Path(index).read_text())["weight_map"]
        names = {file for name, file in by_name.items() if IN_LAYER.search(name) is None}
    for file in filter(None, map(file_of, names)):
        with safe_open(file, "pt") as tensors:
            outside = [name for name in tensors.keys() if IN_LAYER.search(name) is None]  # noqa: SIM118
            shapes = [tensors.get_slice(name).get_shape() for name in outside]
        if any(len(shape) == 2 and shape[0] == 1 for shape in shapes):
            model_config.num_labels = 1


def check_finite(path: str, model: nn.Module) -> None:
    """Raise a UserError for weights that are no finite numbers; it names the first tensor."""
    for name, weight in model.named_parameters():
        # A sum is one pass without a copy; one that overflows is looked at again
        if not weight.detach().sum().isfinite() and not weight.isfinite().all():
            kind = "NaN" if weight.isnan().any() else "infinite numbers"
            raise UserError(
                f"the weights of {path!r} hold {kind}, in {name!r}: what was saved was broken, or "
                "its training had diverged; give another folder or an earlier checkpoint."
            )


def check_weights(path: str, model: Any, report: dict[str, Any], *, has_new_head: bool) -> None:
    """Raise a UserError for weights that are not those of the model.

    `report` is transformers': tensors of other shapes, tensors that only the model has, tensors
    that only the files have. With a new head the files' tensors outside of the trunk are ignored.
    """
    trunk = {model.base_model_prefix, *dict(model.base_model.named_children())}
    wrong = [
        f"{name!r} has the shape {tuple(shape)} in place of {tuple(expected)}"
        for name, shape, expected in sorted(report["mismatched_keys"])
    ]
    for name in sorted(report["missing_keys"]):
        if not (has_new_head and name.partition(".")[0] not in trunk):
            wrong.append(f"{name!r} is missing")
    for name in sorted(report["unexpected_keys"]):
        is_dropped = has_new_head and name.partition(".")[0] not in trunk
        if not is_dropped and BUFFERS.search(name) is None:
            wrong.append(f"{name!r} has no place")
    if wrong:
        raise UserError(
            f"the weights of {path!r} are not those of the {type(model).__name__} of its "
            f"config.json: {wrong[0]}, and {len(wrong) - 1} more."
        )


def check_kind(path: str, model_config: PretrainedConfig, kind: Kind) -> None:
    """Raise a UserError for a reward model given as a policy or the reverse, or for an encoder.

    Quantised weights are refused too: they cannot be trained.
    """
    refuse_other_types(path, model_config)
    holds = ", ".join(getattr(model_config, "architectures", None) or ["an unknown model"])
    is_judge, num_scores = is_classifier(model_config), model_config.num_labels
    refusals = {
        f"is a reward model ({holds}), not a causal language model": is_judge and kind == "policy",
        f"gives {num_scores} scores to a text, not one": is_judge and num_scores != 1,
        f"is not a reward model: it holds {holds}": kind == "reward_model" and not is_judge,
        "has quantised weights (quantization_config), which cannot be trained": getattr(
            model_config, "quantization_config", None
        ),
    }
    for sentence, applies in refusals.items():
        if applies:
            raise UserError(f"{path!r} {sentence}.")


def refuse_other_types(path: str, model_config: PretrainedConfig) -> None:
    """Raise a UserError for encoders, and for models of more than text."""
    model_type = model_config.model_type
    has_more = getattr(model_config, "text_config", None) is not None
    is_other = model_config.is_encoder_decoder or model_type not in CAUSAL
    if has_more or (is_other and model_type in CONFIG_MAPPING_NAMES):
        raise UserError(f"{path!r} is a {model_type} model, not a causal language model.")


def is_classifier(model_config: PretrainedConfig) -> bool:
    """Whether the model has a head of scores, by the name of its class."""
    names = getattr(model_config, "architectures", None) or []
    return any(name.endswith("ForSequenceClassification") for name in names)


def ensure_classifier(model_config: PretrainedConfig) -> bool:
    """Register a sequence classifier for a family that has none, made of the generic one.

    For this process. True if transformers has one, and none is made. A UserError if the generic one
    does not fit the family.
    """
    kind, classifiers = type(model_config), AutoModelForSequenceClassification._model_mapping
    if kind in classifiers:
        return kind not in classifiers._extra_content
    if kind not in AutoModelForCausalLM._model_mapping:  # it comes with Python code
        return False
    causal = AutoModelForCausalLM._model_mapping[kind]
    family = next(c for c in causal.__mro__[1:] if issubclass(c, PreTrainedModel))
    with torch.device("meta"):
        trunk_class = type(causal(copy.deepcopy(model_config)).base_model)

    class Classifier(GenericForSequenceClassification, family):  # type: ignore[misc, valid-type]
        base_model_prefix, config_class = causal.base_model_prefix, kind
        __module__ = causal.__module__  # by which transformers knows what it may do with a class

        def __init__(self, config: PretrainedConfig) -> None:
            PreTrainedModel.__init__(self, config)
            setattr(self, self.base_model_prefix, trunk_class(config))
            self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, False)
            self.post_init()

    try:
        with torch.device("meta"):
            Classifier(model_config).get_input_embeddings()
        fits = trunk_class is not causal
    except (AttributeError, NotImplementedError):  # as of BLT, which has no one hidden size
        fits = False
    if not fits:
        raise UserError(
            f"transformers has no sequence classifier for {kind.model_type}, and its generic one "
            "does not fit; give a reward model of another family."
        )
    Classifier.__name__ = causal.__name__.replace("ForCausalLM", "ForSequenceClassification")
    # Without exist_ok a class of transformers' own config is not registered, without a word.
    AutoModelForSequenceClassification.register(kind, Classifier, exist_ok=True)
    return False


def check_lengths(path: str, model_config: PretrainedConfig, config: CommonConfig) -> None:
    """Raise a UserError where prompt and completion exceed the model's positions or window."""
    limit = max_positions(model_config)
    needed = config.max_prompt_length + config.max_completion_length
    if limit is not None and needed > limit:
        raise UserError(
            f"--max_prompt_length {config.max_prompt_length} plus --max_completion_length "
            f"{config.max_completion_length} is more than the {limit} positions of {path!r}."
        )
    window = getattr(model_config, "sliding_window", None)  # 0: none, as Qwen2-MoE writes it
    if config.layout == "shared_prefix" and window and needed > window:
        raise UserError(
            f"the attention of {path!r} has a window of {window} tokens, and --max_prompt_length "
            f"plus --max_completion_length is {needed}; use --layout padded."
        )


def max_positions(model_config: PretrainedConfig) -> int | None:
    """Longest text, in tokens, whose scores do not depend on its batch; None without a limit.

    With longrope a text beyond the original length switches *all* rows of its batch to other
    angles; with dynamic rotary embeddings a text beyond all positions does (transformers 5.23,
    `modeling_rope_utils.dynamic_rope_update`).
    """
    limits = [getattr(model_config, "max_position_embeddings", None)]
    for field in ("rope_parameters", "rope_scaling"):  # the second in models with remote code
        rope = getattr(model_config, field, None) or {}
        for settings in (rope, *rope.values()):  # of all layers, or of each type of layer
            if not isinstance(settings, dict):
                continue
            if "longrope" in (settings.get("rope_type"), settings.get("type")):
                original = getattr(model_config, "original_max_position_embeddings", None)
                limits.append(settings.get("original_max_position_embeddings", original))
    return min((limit for limit in limits if limit and limit > 0), default=None)  # XLNet: -1
