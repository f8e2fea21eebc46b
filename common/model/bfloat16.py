"""bfloat16 in one process without FSDP, which would walk every argument of every block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class BFloat16Copies:
    """bfloat16 copies of a module's float32 parameters: its forward and backward compute with them.

    At all other times the module has its float32 parameters, which the optimiser, checkpoints and
    exports use. A forward updates the copies if a parameter has changed. At the end of a backward
    gradients are added in float32 to those of the float32 parameters. Results have FSDP's bits, but
    where a block is given float32 tensors (OLMo 2's rotary tables), which FSDP casts.
    """

    def __init__(self, module: Any, float32_modules: Sequence[nn.Module]) -> None:
        """Give the module copies and their hooks. `float32_modules` compute in float32."""
        excluded = {p for child in float32_modules for p in child.parameters()}
        self.held = [p for p in module.parameters() if p.dtype == torch.bfloat16]
        self.slots = [  # where the module has a float32 parameter; a tied one has several
            (child._parameters, name, parameter)
            for child in module.modules()
            for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.dtype != torch.bfloat16 and parameter not in excluded
        ]
        self.copies = {p: nn.Parameter(p.bfloat16(), p.requires_grad) for _, _, p in self.slots}
        self.of_slots = [self.copies[parameter] for _, _, parameter in self.slots]
        self.versions = [p._version for p in self.copies]  # counts autograd's changes
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward, always_call=True)
        module.bfloat16_copies = self

    def swap(self, *, use_copies: bool) -> None:
        """Give the module the copies, or its float32 parameters."""
        for (parameters, name, parameter), copy in zip(self.slots, self.of_slots, strict=False):
            parameters[name] = copy if use_copies else parameter

    @torch.no_grad()
    def before_forward(self, *_: Any) -> None:
        """Update the copies if a parameter has changed, and use them."""
        versions = [p._version for p in self.copies]
        if versions != self.versions:
            torch._foreach_copy_([*self.copies.values()], [*self.copies])
            self.versions = versions
        self.swap(use_copies=True)

    def after_forward(self, _: nn.Module, inputs: Any, output: Any) -> None:
        """Use the copies again from the output's gradient on: backward may recompute blocks."""
        self.swap(use_copies=False)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self.before_backward)

    def before_backward(self, _: torch.Tensor) -> None:
        """Use the copies until the backward ends; called for each tensor of the output."""
        self.swap(use_copies=True)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.after_backward)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add up the gradients in float32: no-op if called again."""
        self.swap(use_copies=False)
        trained = [(p, copy.grad) for p, copy in self.copies.items() if copy.grad is not None]
        first, later = ([t for t in trained if (t[0].grad is None) == new] for new in (True, False))
        for parameter, _ in first:
            parameter.grad = torch.empty_like(parameter)
        for add, pairs in ((torch._foreach_copy_, first), (torch._foreach_add_, later)):
            if pairs:
                add([p.grad for p, _ in pairs], [gradient for _, gradient in pairs])
        for copy in self.copies.values():
            copy.grad = None

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute in float32 inside the block, also with weights that are held in bfloat16."""
        slots, self.slots = self.slots, []
        for parameter in self.held:
            parameter.data = parameter.data.float()
        try:
            yield
        finally:
            self.slots = slots
            for parameter in self.held:
                parameter.data = parameter.data.bfloat16()
