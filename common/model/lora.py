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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from common import distributed
from common.config import CommonConfig, TrainConfig
from common.errors import UserError, gist, shown
from common.model import fsdp
from common.model.checks import refuse_not_finite
from common.noise import derive_seed

TRAINED, REFERENCE = "default", "reference"  # adapters in a model; peft calls the first `default`
SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
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
        saved_name(name, adapter): parameter
        for name, parameter in lm.named_parameters()
        if belongs_to(name, adapter)
    }
    expected = {name: tuple(parameter.shape) for name, parameter in targets.items()}
    found = {n: tuple(w.shape) if w.is_floating_point() else w.dtype for n, w in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        there, needed = found.get(name, "absent"), expected.get(name, "absent")
        if there != needed:
            raise UserError(
                f"{file} does not fit its {SETTINGS_FILE} and its base: {name!r} is {there}, not "
                f"{needed}."
            )
        targets[name].data.copy_(weights[name])
    refuse_not_finite(file, targets.items())


def save_adapter(lm: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained adapter, given its weights among others, as peft's file of weights."""
    weights = {
        saved_name(name, TRAINED): tensor.contiguous()
        for name, tensor in state.items()
        if belongs_to(name, TRAINED) or is_saved_whole(lm, name)
    }
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def saved_name(name: str, adapter: str) -> str:
    """The name in peft's weights file of a parameter of an adapter."""
    return "base_model.model." + name.replace(f".{adapter}.", ".")


# --- adapters in a model --------------------------------------------------------------------------


def add_adapters(
    lm: Any,  # real, or on the meta device
    path: str,  # of the model, or of an adapter on it
    config: CommonConfig,  # of a stage, with `lora_r`
) -> None:
    """Freeze a model but for adapters: new ones, or those of the folder it is loaded from.

    The model, changed in place, then computes what it did before, or what base and adapter do. A
    reward head is trained whole, and saved with the adapters.

    Raises:
        UserError: the fields do not fit the model or the adapter.
    """
    assert isinstance(config, TrainConfig)
    goes_on = is_adapter(path)
    settings = own_settings(path, config) if goes_on else new_settings(lm, path, config)
    torch.manual_seed(derive_seed(config.seed, "LoRA adapters"))
    has_copy = goes_on or getattr(config, "ref_update_steps", 0) > 0  # of the reference's adapter
    adapters = (TRAINED, REFERENCE) if has_copy else (TRAINED,)
    for adapter in adapters:
        inject(lm, settings, adapter, path)
        if goes_on and lm.device.type != "meta":
            load_weights(lm, path, adapter)
    distributed.seed_everything(config.seed)
    if hasattr(lm, "score"):  # only now, since peft would put a copy of the head beside it
        settings.task_type, settings.modules_to_save = "SEQ_CLS", ["score"]
    lm.peft_config = dict.fromkeys(adapters, settings)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(belongs_to(name, TRAINED) or is_saved_whole(lm, name))
    activate(lm, [TRAINED])


def new_settings(lm: nn.Module, path: str, config: TrainConfig) -> Any:
    """Settings of new adapters for peft, on the linear layers of the blocks or on some of them."""
    from peft import LoraConfig

    inside = fsdp.inside_blocks(lm)
    linear: dict[str, Any] = {
        name: part
        for name, part in lm.named_modules()
        if part in inside and isinstance(part, nn.Linear | Conv1D)
    }
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    targets = config.lora_target_modules or kinds
    widths: dict[str, int] = {}  # the smaller sides
    for target in targets:
        fitting = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not fitting:
            raise UserError(
                f"--lora_target_modules has {target!r}; it must be among the linear layers of "
                f"{type(lm).__name__}'s blocks: {', '.join(kinds)}."
            )
        widths |= {name: min(linear[name].weight.shape) for name in fitting}
    narrowest = min(widths, key=widths.__getitem__)
    if config.lora_r > widths[narrowest]:
        most = f"at most {widths[narrowest]}, the smaller side of {narrowest!r}"
        raise config.refused("lora_r", f"{most}, which a higher rank cannot fill")
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        revision=config.model_revision if config.model_revision != "main" else None,
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
    given = {"lora_r": config.lora_r, "lora_alpha": config.lora_alpha}
    for flag, value in (given | {"lora_target_modules": targets}).items():
        if value != found[flag]:
            whose = f"as of the adapter in {path!r}, with which training goes on"
            raise config.refused(flag, f"{found[flag]}, {whose}")
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


def inject(lm: Any, settings: Any, adapter: str, path: str) -> None:
    """Put peft's layers around those that the settings name, or a further adapter into them.

    Raises:
        UserError: there are none, or one outside of the blocks: a tied head is the embedding too.
    """
    from peft import inject_adapter_in_model

    on_meta = lm.device.type == "meta"
    try:
        inject_adapter_in_model(settings, lm, adapter_name=adapter, low_cpu_mem_usage=on_meta)
    except (ValueError, TypeError) as error:
        raise UserError(f"the adapter does not fit {type(lm).__name__}: {gist(error)}.") from None
    del lm.peft_config  # with it peft warns at the next adapter
    inside = fsdp.inside_blocks(lm)
    for name, layer in adapted_layers(lm).items():
        if layer not in inside:
            raise UserError(
                f"the adapter in {path!r} changes {name!r}; it must change layers of the decoder "
                "blocks only."
            )


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

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What the policy's forward returned before training."""
        activate(self.policy, [REFERENCE] if reference_scales(self.policy) else [])
        try:
            return self.policy(*inputs, **options)
        finally:
            activate(self.policy, [TRAINED])


def require_same_shapes(reference: nn.Module, policy: nn.Module) -> None:
    """Raise a UserError for a reference that cannot take the policy's weights."""
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (reference, policy)]
    if not isinstance(reference, AdapterReference) and shapes[0] != shapes[1]:
        raise UserError(
            "--ref_update_steps needs a --ref_model_name_or_path with parameters of the shapes of "
            "--model_name_or_path."
        )


@torch.no_grad()
def mix_into(target: nn.Module, source: nn.Module, alpha: float) -> None:
    """Set target to alpha source + (1 - alpha) target; every rank its own shards, no traffic.

    The target is sharded as the source is, with the same parameters; or it is the reference inside
    the source, whose frozen adapter is set.
    """
    fsdp.reshard(target)
    fsdp.reshard(source)
    pairs = zip(target.parameters(), source.parameters(), strict=True)
    if isinstance(target, AdapterReference):
        named = list(source.named_parameters())
        copied, trained = ([p for n, p in named if belongs_to(n, a)] for a in (REFERENCE, TRAINED))
        pairs = zip(copied, trained, strict=True)
    for old, new in pairs:
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in (old, new)]
        shards[0].lerp_(shards[1], alpha)


def reference_scales(lm: nn.Module) -> dict[str, float]:
    """The scale of the frozen copy in each layer; empty where there is none."""
    layers = adapted_layers(lm).items()
    return {name: layer.scaling[REFERENCE] for name, layer in layers if REFERENCE in layer.lora_A}


# --- adapters merged into weights -----------------------------------------------------------------


def merge_folder(lm: Any, path: str) -> None:
    """Merge the adapter in a folder into the weights of its base."""
    inject(lm, read_settings(path), TRAINED, path)
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


def merged_state(lm: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the plain model that computes what a model with adapters and this one does.

    What is not of an adapter is taken out of `state`, so that no weight is held twice.
    """
    base = {plain_name(name): state.pop(name) for name in list(state) if ".lora_" not in name}
    merged = {name: x.float() if x.is_floating_point() else x for name, x in base.items()}
    for name, layer in adapted_layers(lm).items():
        a, b = (state[f"{name}.lora_{matrix}.{TRAINED}.weight"] for matrix in "AB")
        merged[f"{name}.weight"] = merged_weight(layer, merged[f"{name}.weight"], a, b)
    return merged


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
