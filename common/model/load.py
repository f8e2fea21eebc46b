"""Load tokenizers and Hugging Face models, checked, on rank 0.

Every other rank builds the same model on the meta device and receives its shards from rank 0
(`fsdp.shard`), so a model is read from disk once. Only safetensors are read.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file, extract_commit_hash

from common import distributed
from common.config.flags import ModelFlags
from common.config.stages import CommonConfig
from common.errors import UserError, gist, why_missing
from common.model import checks, lora, text_part
from common.model.checks import Kind
from common.noise import HEAD_STDS, derive_seed
from common.text import differences, synthetic
from common.text.example import Example, Vocabulary


def revision_of(path: str, config: ModelFlags) -> str:
    """Revision of a hub id: `model_revision` for the `model_name_or_path`, else main.

    It has no effect on a folder.
    """
    return config.model_revision if path == config.model_name_or_path else "main"


def load_vocabulary(
    config: CommonConfig, paths: Sequence[str] | None = None, *, has_own_pad: bool = False
) -> Vocabulary:
    """Tokenizer, pad id and stop ids of a run.

    A completion also ends where the models at the `paths` stop (default: `model_name_or_path`).
    With `has_own_pad` the pad token is not the eos: for reward models, see `add_own_pad_token`.
    """
    tokenizer = load_tokenizer(config.tokenizer_path, config)
    if has_own_pad:
        add_own_pad_token(tokenizer)
    paths = [config.model_name_or_path] if paths is None else paths
    for path in paths if config.tokenizer_name_or_path else ():
        refuse_other_tokenizer(path, tokenizer, config)
    return Vocabulary(tokenizer, tokenizer.pad_token_id, stop_token_ids(tokenizer, config, paths))


def load_tokenizer(
    path: str, config: ModelFlags, *, needs_eos: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or folder, or of the embedded task (`synthetic`).

    A tokenizer without a pad token pads with its eos: harmless here, where masks are carried as
    data. A UserError if there is none, or it has no eos token (where it is more than compared).
    """
    if path == "synthetic":
        return synthetic.train_tokenizer()
    if path.endswith(".json"):
        raise UserError(f"--tokenizer_name_or_path is required with the model config {path}.")
    revision = revision_of(path, config)
    checks.check_location(path, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises no subclass of it
        reason = checks.reason(error) + why_missing(path)
        where = "" if Path(path).exists() else ", which is no folder here"
        raise UserError(f"no tokenizer could be loaded from {path!r}{where}: {reason}.") from None
    if needs_eos and tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {path!r} has no eos token, which ends a completion.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, config: CommonConfig, paths: Sequence[str]
) -> list[int]:
    """Ids that end a completion; the first is the one appended to training completions.

    The first is `stop_token`, by default the tokenizer's eos. The others are the eos ids of the
    models at the `paths`, from generation_config.json, else from config.json, and the tokenizer's.
    A UserError for a `stop_token` of several tokens.
    """
    ids = [int(tokenizer.eos_token_id)]
    if config.stop_token != "eos":
        text = config.stop_token.replace("\\n", "\n")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise UserError(
                f"--stop_token {config.stop_token!r} is {len(ids)} tokens; it must be one, or eos."
            )
    for path in paths:
        model_config, revision = find_config(path, tokenizer, config), revision_of(path, config)
        checks.refuse_other_types(path, model_config)
        file = f"{path}/generation_config.json"
        try:
            generation = GenerationConfig.from_pretrained(path, revision=revision)
        except Exception as error:  # of many types, by what is wrong in the file
            if Path(file).is_file() or not isinstance(error, OSError):
                raise UserError(f"{file}: {gist(error)}.") from None
            generation = GenerationConfig.from_model_config(model_config)
        ids += checks.token_ids(generation.eos_token_id, model_config.vocab_size, file)
    return list(dict.fromkeys([*map(int, ids), int(tokenizer.eos_token_id)]))


def read_model_config(
    path: str, kind: Kind, tokenizer: PreTrainedTokenizerBase | None, config: CommonConfig
) -> PretrainedConfig:
    """The model's configuration with dropout off, checked against its use before weights load.

    `kind` is what the model must be: a policy, a reward model, or a trunk for a new reward head
    (either of the two will do). For `tokenizer` see `find_config`.

    Dropout is off in every stage (Huang et al. 2024): with it GRPO's ratio is not 1, DPO's first
    loss is not ln 2, and the noise depends on how rows are split over ranks.

    A UserError if there is no model, or of another kind, with fewer embeddings than the tokenizer
    has tokens, or fewer positions than prompt and completion.
    """
    model_config = find_config(path, tokenizer, config)
    checks.check_kind(path, model_config, kind)
    if tokenizer is not None:
        checks.check_vocabulary(path, model_config, kind, tokenizer)
    checks.check_lengths(path, model_config, config)
    # Weights may be stored in bfloat16; parameters are float32 on every rank, also on those that
    # build the model without reading it.
    model_config.dtype = torch.float32
    for name, value in model_config.to_dict().items():
        if "drop" in name and isinstance(value, int | float):  # dropout, resid_pdrop, layerdrop
            setattr(model_config, name, 0.0)
    return model_config


def read_policy_and_reference(
    config: Any, tokenizer: PreTrainedTokenizerBase
) -> list[PretrainedConfig]:
    """Configurations of DPO's or GRPO's two models; a UserError if they have other tokens."""
    paths = (config.model_name_or_path, config.reference_path)
    configs = [read_model_config(path, "policy", tokenizer, config) for path in paths]
    if paths[1] != paths[0]:
        refuse_other_tokenizer(paths[1], tokenizer, config)
    return configs


def refuse_other_tokenizer(
    path: str, tokenizer: PreTrainedTokenizerBase, config: CommonConfig
) -> None:
    """Raise a UserError for a policy whose tokenizer gives a text other ids than the run's.

    It may lack added tokens, as a pad token or those of chats, which a base does without. Where
    `tokenizer_name_or_path` says how texts are read, ids must be the same tokens, and a line names
    other differences.
    """
    other = other_tokenizer(path, config)
    clause = other and differences.of_tokenizers(tokenizer, other)
    if not clause:
        return
    sentence = f"{path!r} has another tokenizer than {config.tokenizer_path!r}: {clause}"
    if not config.tokenizer_name_or_path or differences.of_tables(tokenizer, other):
        raise UserError(f"{sentence}; the two cannot be in one run.")
    distributed.print_rank0(f"{sentence}; it reads texts as the latter does")


def compare_templates(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[Example],
    config: CommonConfig,
    own_text: Sequence[str] = (),  # the paths of those that are judged by what they read
) -> None:
    """Compare the chat templates of models that read the text of the run's.

    A line names one that writes the conversations in another way. A UserError for a model of
    `own_text`, unless only the opening differs, as a default system turn. With
    `tokenizer_name_or_path` the user has named one template for all.
    """
    chats = [example for example in examples if example.messages]
    for path in dict.fromkeys(paths) if chats and not config.tokenizer_name_or_path else ():
        other = other_tokenizer(path, config)
        difference = other and differences.of_conversations(chats, tokenizer, other)
        if not difference:
            continue
        kind, clause, is_opening = difference
        sentence = f"{path!r} has another {kind} than {config.tokenizer_path!r}: {clause}"
        if path in own_text and not is_opening:
            advice = "evaluate the two separately, or name one for all by --tokenizer_name_or_path"
            raise UserError(f"{sentence}; {advice}.")
        distributed.print_rank0(f"{sentence}; it reads the rows as the latter writes them")


def other_tokenizer(path: str, config: CommonConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model; None where it is the run's, or the folder has none."""
    is_same = path == config.tokenizer_path or path.endswith(".json")
    has_none = is_same or checks.lacks(path, "tokenizer")
    return None if has_none else load_tokenizer(path, config, needs_eos=False)


def find_config(
    path: str, tokenizer: PreTrainedTokenizerBase | None, config: ModelFlags
) -> PretrainedConfig:
    """The configuration of a hub id or folder, or of a .json with the tokenizer's vocabulary.

    Of a model of text and images that of its text model (see `text_part.alone`). A UserError if
    there is no model.
    """
    revision = revision_of(path, config)
    checks.check_location(path, "model")
    try:
        if path.endswith(".json"):
            fields = json.loads(Path(path).read_text())
            checks.refuse_unknown_fields(path, fields)
            if tokenizer is not None:
                num_ids, eos_id = checks.count_ids(tokenizer), tokenizer.eos_token_id
                fields |= {"vocab_size": num_ids, "eos_token_id": eos_id}
                fields |= {"bos_token_id": tokenizer.bos_token_id}
            return checks.drop_leftovers(path, AutoConfig.for_model(**fields))
        model_config: PretrainedConfig = checks.drop_leftovers(
            path,
            AutoConfig.from_pretrained(
                path, revision=revision, trust_remote_code=config.trust_remote_code
            ),
        )
        checks.count_labels(path, revision, model_config)
        file = cached_file(path, "config.json", revision=revision)
        model_config._commit_hash = extract_commit_hash(file, None)
        text_config = text_part.config_of(model_config)
        if text_config and config.lora_r > 0 and path == config.model_name_or_path:
            raise config.refused("lora_r", f"0: an adapter would not fit the whole {path!r}")
        return text_config or model_config
    except UserError:
        raise
    except Exception as error:  # of many types, by what is wrong in the folder
        reason = checks.reason(error) + why_missing(path)
        where = "" if Path(path).exists() else ", which is no folder here"
        raise UserError(f"no model could be found at {path!r}{where}: {reason}.") from None


def load_policy(
    path: str, model_config: PretrainedConfig, config: ModelFlags, *, trains: bool = False
) -> PreTrainedModel:
    """A causal language model in float32: real on rank 0, on the meta device elsewhere.

    With `trains` and `lora_r` the model gets new adapters, and everything else is frozen.
    """
    lm = load(AutoModelForCausalLM, path, model_config, config)
    if trains and config.lora_r > 0:
        lora.add_adapters(lm, path, config)
    if not trains:
        return lm
    try:
        lm.generation_config.validate(strict=True)
    except ValueError:
        # Many published folders have a temperature without `do_sample`. It has no effect, but
        # transformers refuses to write it after the training.
        lm.generation_config = GenerationConfig.from_model_config(lm.config)
        text = f"generation_config.json of {path!r} contradicts itself and is not exported"
        distributed.print_rank0(f"warning: {text}; its special tokens are.")
    return lm


def load_reward_model(
    path: str,
    model_config: PretrainedConfig,
    tokenizer: Any,
    config: ModelFlags,
    head_init: str = "stiennon",
    *,
    trains: bool = False,
) -> PreTrainedModel:
    """A sequence classifier with one label: real on rank 0, on the meta device elsewhere.

    A causal language model gives the trunk; the head is drawn (`HEAD_STDS`) before sharding, the
    same for any number of ranks. The pad token is not the eos, because transformers reads the score
    of a padded row at the last token that is not pad. With `trains` and `lora_r` everything but
    adapters and head is frozen. A UserError for a `head_init` of a model with a head.
    """
    is_fresh = not checks.is_classifier(model_config)
    if head_init != "stiennon" and not is_fresh:
        raise UserError(
            f"--head_init is {head_init}; it must be stiennon with {path!r}, which has a head."
        )
    model_config.num_labels = 1
    if not checks.ensure_classifier(model_config):
        distributed.print_rank0(
            f"warning: transformers has no sequence classifier for {model_config.model_type}; only "
            "this project loads the reward model"
        )
    lm = load(AutoModelForSequenceClassification, path, model_config, config)
    checks.check_head(path, lm)
    num_ids = max(len(tokenizer), tokenizer.pad_token_id + 1)
    if num_ids > (old_size := lm.config.vocab_size):
        lm.resize_token_embeddings(num_ids, mean_resizing=False)
        with torch.no_grad():  # no random numbers, which a checkpoint of adapters would not have
            lm.get_input_embeddings().weight[old_size:] = 0
    lm.config.pad_token_id = tokenizer.pad_token_id
    if is_fresh and distributed.is_rank0():
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "reward head"))
        head = lm.score.weight  # (1, D)
        with torch.no_grad():
            std = HEAD_STDS[head_init](head.shape[1])
            head.copy_(torch.randn(head.shape, generator=generator) * std)
    if trains and config.lora_r > 0:
        lora.add_adapters(lm, path, config)
    return lm


def load(
    auto_class: Any, path: str, model_config: PretrainedConfig, config: ModelFlags
) -> PreTrainedModel:
    """Read or initialise on rank 0 in float32; build on the meta device elsewhere.

    A UserError if weights cannot be read, have other shapes, belong to a larger model, or lack
    parameters (other than a new reward head), which would silently start random.
    """
    revision, is_config = revision_of(path, config), path.endswith(".json")
    if is_config and config.lora_r > 0 and path == config.model_name_or_path:
        needed = "a folder or hub id with --lora_r: a config has no weights to adapt"
        raise config.refused("model_name_or_path", needed)
    if is_config or not distributed.is_rank0():
        torch.manual_seed(derive_seed(config.seed, "model initialisation"))
        with torch.device("cpu" if distributed.is_rank0() else "meta"):
            model = auto_class.from_config(model_config, trust_remote_code=config.trust_remote_code)
        distributed.seed_everything(config.seed)
        return model
    options = {"revision": revision, "trust_remote_code": config.trust_remote_code}
    whole_config = checks.drop_leftovers(path, AutoConfig.from_pretrained(path, **options))
    has_more = text_part.config_of(whole_config) is not None
    try:
        model, report = (AutoModelForImageTextToText if has_more else auto_class).from_pretrained(
            path,
            config=whole_config if has_more else model_config,
            dtype=torch.float32,
            use_safetensors=True,  # a .bin is a pickle: it runs code when it is loaded
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # of many types, as above
        reason = checks.reason(error)
        names = sorted(file.name for file in Path(path).glob("*model*"))
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        if pickles and not any(name.endswith(".safetensors") for name in names):
            remedy = "save the model again as safetensors"
            reason += f"; {pickles[0]} is a pickle, which may run code: {remedy}"
        raise UserError(
            f"no safetensors weights could be loaded from {path!r}: {reason}."
        ) from None
    is_classifier = auto_class is AutoModelForSequenceClassification and not has_more
    has_new_head = is_classifier and not checks.is_classifier(model_config)
    if is_classifier:  # else what its head lacks would be the reason
        has_trained = not any(name.startswith("score.") for name in report["missing_keys"])
        checks.check_head(path, model, is_lost=has_new_head and has_trained)
    checks.check_weights(path, model, report, has_new_head=has_new_head)
    checks.check_finite(path, model)
    if has_more:
        print(f"the text model of {path!r}, a {whole_config.model_type}, is used alone", flush=True)
        return text_part.alone(path, model, auto_class, model_config)
    head = model.get_output_embeddings()
    is_untied = head is not None and head.weight is not model.get_input_embeddings().weight
    if is_untied and getattr(model_config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False  # as the files are, for copies and the export
        print(f"warning: the head of {path!r} is untied; its config.json ties it", flush=True)
    return model


def add_own_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a pad token that is not its eos: scores are read before the padding."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
