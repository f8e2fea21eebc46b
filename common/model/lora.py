"""LoRA through peft: small trained matrices beside frozen weights (Hu et al. 2021, eq. 3).

    W' = W + (alpha / r) B A        W (out, in) frozen, A (r, in) drawn at random, B (out, r) from 0

peft's layers are put into the model in place, so that it keeps its Hugging Face class and forward.
Adapters are float32 like all parameters: under bf16 FSDP gathers bfloat16 copies of them, and the
optimiser keeps the float32 ones.

The policy before training is still there, with its adapters off, so a reference needs no second
model. A run that starts from an adapter goes on with it, and keeps a frozen copy of it beside: the
reference is then the base with this copy, not the bare base.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common import distributed
from common.config import TrainConfig
from common.errors import UserError, gist, shown
from common.model.checks import refuse_not_finite
from common.noise import derive_seed

TRAINED, REFERENCE = "default", "reference"  # adapters in a model; peft calls the first `default`
SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in peft's weights file
# Settings with which peft computes something else than W + (alpha / r) B A
VARIANTS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
    *("target_parameters", "trainable_token_indices"),
)


# --- adapter folders ------------------------------------------------------------------------------


def is_adapter(path: str) -> bool:
    """Whether a path is the folder of an adapter, which holds no model of its own."""
    return (Path(path) / SETTINGS_FILE).is_file()


def base_path(path: str) -> str:
    """The model that an adapter's folder was trained on; any other path as it is."""
    return str(read_settings(path).base_model_name_or_path) if is_adapter(path) else path


def read_settings(path: str) -> Any:
    """Settings in an adapter's folder, without dropout, which is off in every stage.

    Raises:
        UserError: they cannot be read, are none of plain LoRA, or do not name their base.
    """
    from peft import LoraConfig

    try:
        settings: Any = LoraConfig.from_pretrained(path)
        if isinstance(getattr(settings, "target_modules", None), str):
            re.compile(settings.target_modules)
    except (OSError, ValueError, TypeError, KeyError, re.error) as error:
        raise UserError(f"{path}/{SETTINGS_FILE} could not be read: {gist(error)}.") from None
    if settings.peft_type != "LORA":
        raise UserError(f"the adapter in {path!r} is {settings.peft_type.value}; it must be LORA.")
    for name in VARIANTS:
        if getattr(settings, name):
            raise UserError(
                f"the adapter in {path!r} has {name} {shown(getattr(settings, name))}; it must be "
                "plain LoRA, W + (alpha / r) B A."
            )
    if not settings.base_model_name_or_path:
        raise UserError(f"{path}/{SETTINGS_FILE} names no base_model_name_or_path.")
    settings.inference_mode, settings.lora_dropout = False, 0.0
    return settings


def load_weights(lm: Any, folder: str, adapter: str) -> None:
    """Copy the weights in an adapter's folder into an adapter of a real model.

    Raises:
        UserError: they are not there, not finite, or not exactly the adapter's matrices A and B.
    """
    file = f"{folder}/{WEIGHTS_FILE}"
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"no {WEIGHTS_FILE} could be read in {folder!r}: {gist(error)}.") from None
    targets = {
        PREFIX + name.replace(f".{adapter}.", "."): parameter
        for name, parameter in lm.named_parameters()
        if belongs_to(name, adapter)
    }
    misfit = f"{file} does not fit its {SETTINGS_FILE} and its base"
    for name in sorted(targets.keys() ^ weights.keys()):
        raise UserError(f"{misfit}: {name!r} is in one of them only.")
    for name, parameter in targets.items():
        found, expected = tuple(weights[name].shape), tuple(parameter.shape)
        if found != expected:
            raise UserError(f"{misfit}: {name!r} is {found}, not {expected}.")
        if not weights[name].is_floating_point():
            raise UserError(f"{misfit}: {name!r} is {weights[name].dtype}, no floating point.")
        parameter.data.copy_(weights[name])
    refuse_not_finite(file, targets.items())


def save_adapter(lm: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained adapter, given the model's whole state, into a folder that peft loads."""
    from peft import get_peft_model_state_dict

    settings = lm.peft_config[TRAINED]
    settings.inference_mode = True  # as peft writes it
    settings.save_pretrained(str(folder))
    weights = get_peft_model_state_dict(lm, dict(state), TRAINED, save_embedding_layers=False)
    weights |= {name: tensor for name, tensor in state.items() if is_saved_whole(lm, name)}
    named = {PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


# --- adapters in a model --------------------------------------------------------------------------


def add_adapters(
    lm: Any,  # real, or on the meta device
    blocks: Sequence[nn.Module],  # of its decoder
    path: str,  # of the model, or of an adapter on it
    config: TrainConfig,
    *,
    with_copy: bool = False,  # a frozen one also of new adapters: the reference will be replaced
    head: str = "",  # a module that is trained whole, and saved with the adapters
) -> None:
    """Freeze a model but for adapters: new ones, or those of the folder it is loaded from.

    The model, changed in place, then computes what it did before, or what base and adapter do.

    Raises:
        UserError: the fields do not fit the model or the adapter.
    """
    goes_on = is_adapter(path)
    settings = own_settings(path, config) if goes_on else new_settings(lm, blocks, path, config)
    torch.manual_seed(derive_seed(config.seed, "LoRA adapters"))
    adapters = (TRAINED, REFERENCE) if goes_on or with_copy else (TRAINED,)
    for adapter in adapters:
        inject(lm, settings, adapter)
        refuse_outside(lm, blocks, path)
        if goes_on and not is_meta(lm):
            load_weights(lm, path, adapter)
    distributed.seed_everything(config.seed)
    if head:  # only now, since peft would put a copy of the module beside it
        settings.task_type, settings.modules_to_save = "SEQ_CLS", [head]
    lm.peft_config = dict.fromkeys(adapters, settings)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(belongs_to(name, TRAINED) or is_saved_whole(lm, name))
    activate(lm, [TRAINED])


def new_settings(lm: nn.Module, blocks: Sequence[nn.Module], path: str, config: TrainConfig) -> Any:
    """Settings of new adapters for peft, on the linear layers of the blocks or on some of them."""
    from peft import LoraConfig

    inside = {part for block in blocks for part in block.modules()}
    parts = [(name, part) for name, part in lm.named_modules() if part in inside]
    linear = {name: part for name, part in parts if isinstance(part, nn.Linear | Conv1D)}
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    for target in config.lora_target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            raise UserError(
                f"--lora_target_modules has {target!r}; it must be among the linear layers of "
                f"{type(lm).__name__}'s blocks: {', '.join(kinds)}."
            )
    targets = config.lora_target_modules or kinds
    ends = tuple(f".{name}" for name in targets)
    widths = {n: min(part.weight.shape) for n, part in linear.items() if f".{n}".endswith(ends)}
    narrowest = min(widths, key=widths.__getitem__)
    if config.lora_r > widths[narrowest]:
        raise UserError(
            f"--lora_r is {config.lora_r}; it must be at most {widths[narrowest]}, the smaller "
            f"side of {narrowest!r}, which a higher rank cannot fill."
        )
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in linear.values()),
    )


def own_settings(path: str, config: TrainConfig) -> Any:
    """Settings of the adapter in a folder, which have to be those of the config."""
    settings = read_settings(path)
    if settings.init_lora_weights not in (True, False, "gaussian"):
        raise UserError(
            f"the adapter in {path!r} was begun with {settings.init_lora_weights!r}, which changes "
            "its base; training cannot go on with it: leave --lora_r at 0, which merges it."
        )
    found = flags_of(settings)
    targets = sorted(config.lora_target_modules) or found["lora_target_modules"]
    given = (config.lora_r, config.lora_alpha, targets)
    for flag, value in zip(("lora_r", "lora_alpha", "lora_target_modules"), given, strict=True):
        if value != found[flag]:
            raise UserError(
                f"--{flag} is {value}; the adapter in {path!r}, with which training goes on, has "
                f"{found[flag]}."
            )
    return settings


def flags_of(settings: Any) -> dict[str, Any]:
    """The flags that make adapters with these settings."""
    targets = settings.target_modules
    return {
        "lora_r": settings.r,
        "lora_alpha": settings.lora_alpha,
        "lora_target_modules": targets if isinstance(targets, str) else sorted(targets or ()),
        "model_name_or_path": settings.base_model_name_or_path,
    }


def description(model: nn.Module) -> dict[str, Any] | None:
    """What a checkpoint of adapters belongs to; None of a model without LoRA."""
    for part in model.modules():
        if settings := getattr(part, "peft_config", {}).get(TRAINED):
            return flags_of(settings)
    return None


def inject(lm: Any, settings: Any, adapter: str) -> None:
    """Put peft's layers around those that the settings name, or a further adapter into them."""
    from peft import inject_adapter_in_model

    options = {"adapter_name": adapter, "low_cpu_mem_usage": is_meta(lm)}
    try:
        inject_adapter_in_model(settings, lm, **options)
    except (ValueError, TypeError) as error:
        raise UserError(f"the adapter does not fit {type(lm).__name__}: {gist(error)}.") from None
    del lm.peft_config  # with it peft warns at the next adapter


def refuse_outside(lm: nn.Module, blocks: Sequence[nn.Module], path: str) -> None:
    """Raise a UserError for an adapter of other layers: a tied head would change the embedding."""
    inside = {part for block in blocks for part in block.modules()}
    for name, layer in adapted_layers(lm).items():
        if layer not in inside:
            raise UserError(
                f"the adapter in {path!r} changes {name!r}; it must change layers of the decoder "
                "blocks only."
            )


def is_meta(lm: nn.Module) -> bool:
    """Whether a model has no storage, as on all ranks but the one that reads it."""
    return next(lm.parameters()).is_meta


def belongs_to(name: str, adapter: str) -> bool:
    """Whether a parameter's name is that of a matrix of the adapter."""
    return name.endswith((f".lora_A.{adapter}.weight", f".lora_B.{adapter}.weight"))


def is_saved_whole(lm: Any, name: str) -> bool:
    """Whether a parameter is that of a module which is trained whole, as a reward head."""
    return name.rpartition(".")[0] in (lm.peft_config[TRAINED].modules_to_save or [])


def adapted_layers(lm: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name; none in a model without LoRA."""
    return {name: part for name, part in lm.named_modules() if hasattr(part, "lora_A")}


def activate(lm: nn.Module, adapters: list[str]) -> None:
    """Compute with these adapters.

    peft's own switches set `requires_grad` too. FSDP reads that when it first gathers a parameter:
    an adapter that was off at that moment would never get a gradient.
    """
    for layer in adapted_layers(lm).values():
        layer._active_adapter = adapters


@contextmanager
def at_start(lm: nn.Module) -> Iterator[None]:
    """Inside, a model computes what it did before its adapters were trained."""
    activate(lm, [REFERENCE] if reference_scales(lm) else [])
    try:
        yield
    finally:
        activate(lm, [TRAINED])


class AdapterReference(nn.Module):
    """The policy that a LoRA run started from, in the memory of the one that it trains."""

    def __init__(self, policy: nn.Module) -> None:
        """Look at a sharded policy with adapters."""
        super().__init__()
        self.policy = policy

    @property
    def lm(self) -> Any:
        """The Hugging Face model."""
        return self.policy.lm

    def adapter(self, name: str) -> list[nn.Parameter]:
        """The matrices of an adapter, in the order of the layers."""
        return [p for key, p in self.policy.named_parameters() if belongs_to(key, name)]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What the policy's forward returned before training."""
        with at_start(self.policy):
            return self.policy(*inputs, **options)


def reference_state(lm: nn.Module) -> dict[str, Tensor]:
    """What an `AdapterReference` computes with, by the names of a plain model."""
    state = lm.state_dict().items()
    return {plain_name(name): tensor for name, tensor in state if not belongs_to(name, TRAINED)}


def reference_scales(lm: nn.Module) -> dict[str, float]:
    """The scale of the frozen copy in each layer; empty where there is none."""
    layers = adapted_layers(lm).items()
    return {name: layer.scaling[REFERENCE] for name, layer in layers if REFERENCE in layer.lora_A}


# --- adapters merged into weights -----------------------------------------------------------------


def merge_folder(lm: Any, blocks: Sequence[nn.Module], path: str) -> None:
    """Merge the adapter in a folder, if it is one, into the weights of its base, where they are."""
    if not is_adapter(path) or is_meta(lm):
        return
    inject(lm, read_settings(path), TRAINED)
    refuse_outside(lm, blocks, path)
    load_weights(lm, path, TRAINED)
    for name, layer in adapted_layers(lm).items():
        layer.merge()
        lm.set_submodule(name, layer.get_base_layer())
    lm.requires_grad_(True)


def merged_weight(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W + (alpha / r) B A, float32, of one of peft's layers (Hu et al. 2021, eq. 3).

    `a` is (r, in), `b` (out, r), and the weight (out, in), or (in, out) of a `Conv1D`.
    """
    update: Tensor = layer.scaling[TRAINED] * (b.float() @ a.float())  # (out, in)
    return weight.float() + (update.t() if layer.fan_in_fan_out else update)


def merged_state(lm: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the plain model that computes what a model with adapters and this one does."""
    merged = {plain_name(name): tensor for name, tensor in state.items() if ".lora_" not in name}
    for name, layer in adapted_layers(lm).items():
        a, b = (state[f"{name}.lora_{matrix}.{TRAINED}.weight"] for matrix in "AB")
        merged[f"{name}.weight"] = merged_weight(layer, merged[f"{name}.weight"], a, b)
    return merged


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
