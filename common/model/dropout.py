"""Dropout, which is off unless a run asks for it: the detail that Huang et al. (2024) leave out.

Its noise is a function of (seed, step, rank): a run can be resumed exactly, but other than all else
here its losses depend on the number of ranks and on the micro-batches.
"""

from dataclasses import dataclass

import torch
from torch import nn

from common import distributed
from common.config import UserError, knob, require_within
from common.model.lora import LoraTrainConfig
from common.noise import derive_seed


@dataclass
class DropoutTrainConfig(LoraTrainConfig):
    """The field of the stages that can train with dropout."""

    dropout: float = knob(
        0.0,
        "share of activations set to 0 in training, in every dropout layer of the model; --layout "
        "padded only",
    )

    def __post_init__(self) -> None:
        """Refuse values that no run may have."""
        super().__post_init__()
        require_within(self, "dropout", 0, 1)
        if self.dropout and self.layout != "padded":
            raise UserError(
                f"--dropout is {self.dropout:g} and --layout {self.layout}; it must be padded: "
                "a prompt that is shared would lose the same activations for all its completions."
            )
        if self.dropout and self.lora_r:
            raise UserError(
                f"--dropout is {self.dropout:g} and --lora_r {self.lora_r}; one of them must be 0."
            )


def layers(model: nn.Module) -> list[nn.Dropout]:
    """The dropout layers of a model; attention reads the share of its own."""
    return [part for part in model.modules() if isinstance(part, nn.Dropout)]


def refuse_without(lm: nn.Module, config: DropoutTrainConfig) -> None:
    """Raise a UserError where dropout is asked for, and the model has none."""
    if config.dropout and not layers(lm):
        raise UserError(
            f"--dropout is {config.dropout:g}; it must be 0 for {type(lm).__name__}, which has no "
            "dropout."
        )


def start_step(model: nn.Module, config: DropoutTrainConfig, step: int) -> None:
    """Turn dropout on, with the noise of this step on this rank."""
    if config.dropout:
        torch.manual_seed(derive_seed(config.seed, "dropout", step, distributed.rank()))
        set_share(model, config.dropout)


def end_step(model: nn.Module, config: DropoutTrainConfig) -> None:
    """Turn dropout off, before anything is evaluated or sampled."""
    if config.dropout:
        set_share(model, 0.0)


def set_share(model: nn.Module, share: float) -> None:
    """What every dropout layer sets to 0; it and the module that has it are told that they train.

    The others stay in the mode that `fsdp.set_mode` gave them.
    """
    for part in model.modules():
        for layer in part.children():
            if isinstance(layer, nn.Dropout):
                layer.p = share
                layer.training = part.training = True
