"""LoRA through peft: small trained matrices added to frozen weights (Hu et al. 2021, eq. 3).

    W' = W + (alpha / r) B A        W (out, in) frozen, A (r, in) drawn at random, B (out, r) from 0

peft's layers are put into the model in place, so that it keeps its Hugging Face class and forward.
Adapters are float32 like all parameters: under bf16 FSDP gathers bfloat16 copies of them, and the
optimiser keeps the float32 ones.

With its adapters off the policy is the one before training, so a reference needs no second model.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common import distributed
from common.config.flags import ModelFlags
from common.config.stages import TrainConfig
from common.errors import UserError
from common.model import fsdp
from common.noise import derive_seed

ADAPTER = "default"  # peft's name of an adapter, in those of its parameters
# Classes of linear layers. Other subclasses of nn.Linear are routers, which return a tuple.
LINEAR = ("Linear", "Conv1D", "FalconLinear")
SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(lm: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained adapter's weights, picked out of the `state`, as peft's file."""
    named = {
        "base_model.model." + name.replace(f".{ADAPTER}.", "."): tensor.contiguous()
        for name, tensor in state.items()
        if ".lora_" in name or is_saved_whole(lm, name)
    }
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


# --- adapters in a model --------------------------------------------------------------------------


def add_adapters(
    lm: Any,  # real, or on the meta device
    path: str,  # of the model
    config: ModelFlags,  # of a training stage, with `lora_r`
) -> None:
    """Freeze a model and add adapters to it, in place.

    The model still computes what it did before. A reward head is trained whole, and saved with the
    adapters. A UserError if the fields do not fit the model.
    """
    assert isinstance(config, TrainConfig)
    settings = new_settings(lm, path, config)
    torch.manual_seed(derive_seed(config.seed, "LoRA adapters"))
    inject(lm, settings)
    distributed.seed_everything(config.seed)
    weights = [layer.base_layer.weight for layer in adapted_layers(lm).values()]
    if len(set(weights)) < len(weights):
        raise UserError(
            f"layers of {type(lm).__name__} share weights, into which separate adapters cannot be "
            "merged; name others in --lora_target_modules, or train without --lora_r."
        )
    print_share(lm)
    if hasattr(lm, "score"):  # after injecting, where peft would have copied the head
        settings.task_type, settings.modules_to_save = "SEQ_CLS", ["score"]
    lm.peft_config = {ADAPTER: settings}
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(".lora_" in name or is_saved_whole(lm, name))


def print_share(lm: nn.Module) -> None:
    """Print which matrices of the blocks have no adapter, such as the stacked ones of experts."""
    adapted = {layer.base_layer.weight for layer in adapted_layers(lm).values()}
    named = [item for block in fsdp.blocks(lm) for item in block.named_parameters()]
    matrices = [(n, p) for n, p in named if p.ndim > 1 and not re.search("bias|lora_", n)]
    if without := sorted({n.removesuffix(".weight") for n, p in matrices if p not in adapted}):
        share = sum(p.numel() for p in adapted) / sum(p.numel() for _, p in matrices)
        distributed.print_rank0(
            f"adapters are on {share:.1%} of the blocks' weights; none on {', '.join(without)}"
        )


def new_settings(lm: Any, path: str, config: TrainConfig) -> Any:
    """Settings of new adapters for peft, on `lora_target_modules` or all the blocks' layers."""
    from peft import LoraConfig
    from peft.utils import transformers_weight_conversion as experts

    inside = fsdp.inside_blocks(lm)
    # In some mixtures peft (0.21) takes names as `up_proj` for stacked experts, whatever they are.
    pattern = experts._MODEL_TO_CONVERSION_PATTERN.get(lm.config.model_type)
    taken = {*experts._MOE_TARGET_MODULE_MAPPING.get(pattern, {})}
    if lm.config.model_type in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"):
        taken.add("out_proj")  # peft refuses it: the kernels read its weight
    linear = {
        name: module
        for name, module in lm.named_modules()
        if module in inside and type(module).__name__ in LINEAR
        if name.rpartition(".")[2] not in taken
    }
    # A layer of a list is named with the list: a number alone would also name blocks
    kinds = sorted({re.sub(r".*\.(?=\w*[a-z])", "", name) for name in linear})
    targets = config.lora_target_modules or kinds
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            raise UserError(
                f"--lora_target_modules has {target!r}; it must be among the linear layers of "
                f"{type(lm).__name__}'s blocks: {', '.join(kinds)}."
            )
    ends = tuple(f".{target}" for target in targets)
    outside = [n for n, m in lm.named_modules() if m not in inside and f".{n}".endswith(ends)]
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        exclude_modules=outside or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        revision=config.model_revision if config.model_revision != "main" else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in linear.values()),
    )


def inject(lm: Any, settings: Any) -> None:
    """Wrap the layers that the settings name in peft's."""
    from peft import inject_adapter_in_model

    on_meta = lm.device.type == "meta"
    inject_adapter_in_model(settings, lm, adapter_name=ADAPTER, low_cpu_mem_usage=on_meta)
    # A head that is tied to the embedding must have no adapter.
    assert fsdp.inside_blocks(lm).issuperset(adapted_layers(lm).values())


def is_saved_whole(lm: Any, name: str) -> bool:
    """Whether a parameter is of a module that is trained whole, such as a reward head."""
    return name.rpartition(".")[0] in (lm.peft_config[ADAPTER].modules_to_save or [])


def adapted_layers(lm: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by name; none in a model without LoRA."""
    return {name: layer for name, layer in lm.named_modules() if hasattr(layer, "lora_A")}


class AdapterReference(nn.Module):
    """The reference of a LoRA run: the policy with its adapters off."""

    def __init__(self, policy: nn.Module) -> None:
        """Share a sharded policy with adapters."""
        super().__init__()
        self.policy = policy

    @property
    def lm(self) -> Any:
        """The Hugging Face model."""
        return self.policy.lm

    def forward(self, batch: Any, **options: Any) -> Any:
        """The forward of the policy before training.

        peft's own switches also set `requires_grad`, which FSDP reads when it first gathers a
        parameter: an adapter that was off at that moment would never get a gradient.
        """
        layers = adapted_layers(self.policy).values()
        for layer in layers:
            layer._active_adapter = []
        try:
            return self.policy(batch, **options)
        finally:
            for layer in layers:
                layer._active_adapter = [ADAPTER]


# --- adapters merged into weights -----------------------------------------------------------------


def merged_weight(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W + (alpha / r) B A of a peft layer, float32 (Hu et al. 2021, eq. 3).

    `a` is (r, in), `b` (out, r), and the weight (out, in), or (in, out) of a `Conv1D`.
    """
    update: Tensor = layer.scaling[ADAPTER] * (b.float() @ a.float())  # (out, in)
    return weight.float() + (update.t() if layer.fan_in_fan_out else update)


def merged_state(lm: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of the plain model that equals a model with adapters and this `state`.

    Base weights are moved out of `state`, so that no weight is held twice.
    """
    base = {plain_name(name): state.pop(name) for name in list(state) if ".lora_" not in name}
    merged = {name: w.float() if w.is_floating_point() else w for name, w in base.items()}
    for name, layer in adapted_layers(lm).items():
        a, b = (state[f"{name}.lora_{matrix}.{ADAPTER}.weight"] for matrix in "AB")
        merged[f"{name}.weight"] = merged_weight(layer, merged[f"{name}.weight"], a, b)
    return merged


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
