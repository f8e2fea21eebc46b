"""An objective by its name or file, with its settings; a check of what it returns."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import distributed
from common.errors import UserError, hint
from common.record.glossary import OBJECTIVE_PREFIX

METRICS = ("clip_fraction",)  # logged by their plain names
TENSORS = ("logps", "old_logps", "sampled_logps", "advantages", "mask")
TYPES = (bool, int, float, str)  # of settings
POLICY = sorted(file.stem for file in Path(__file__).with_name("policy").glob("[!_]*.py"))


@dataclass(frozen=True)
class PolicyObjective:
    """The function of an objective with its settings."""

    name: str
    function: Callable[..., Any]
    tensors: Sequence[str]  # those of `TENSORS` that it takes
    settings: dict[str, Any]

    def __call__(
        self,
        logps: Tensor,
        old_logps: Tensor,
        sampled_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token and metrics, (B, C) each; advantages (B, C), or (B,)."""
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        before = (old_logps.detach(), sampled_logps.detach())
        values = zip(TENSORS, (logps, *before, advantages.expand_as(logps), mask), strict=True)
        result = self.function(**{n: v for n, v in values if n in self.tensors}, **self.settings)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        return loss, {n if n in METRICS else f"{OBJECTIVE_PREFIX}{n}": metrics[n] for n in metrics}

    @property
    def corrects_sampler(self) -> bool:
        """Whether its ratio is that to the sampler."""
        return "sampled_logps" in self.tensors and "old_logps" not in self.tensors

    def refused(self, reason: str) -> UserError:
        """The error for an objective that cannot be used."""
        return UserError(f"--policy_objective {self.name} {reason}; see docs/objectives.md.")

    def check(self) -> None:
        """Call it on a tiny batch; raise a UserError, or warn, if what it returns is no loss."""
        mask = torch.tensor([[True, True, False], [True, False, False]])
        logps = torch.full((2, 3), -1.0, requires_grad=True)
        advantages = torch.tensor([1.0, -1.0])[:, None].expand(2, 3)
        try:
            loss, metrics = self(logps, logps, logps, advantages, mask)
        except ValueError as error:
            raise self.refused(f"cannot be computed: {error}") from error
        if any(getattr(each, "shape", None) != mask.shape for each in (loss, *metrics.values())):
            raise self.refused("returns a loss or a metric that has not the shape (B, C) of logps")
        if not loss.isfinite().all():
            raise self.refused("returns a loss that is not finite")
        if loss[~mask].any():
            raise self.refused("returns a loss that is not 0 where the mask is False")
        if not loss.requires_grad:
            raise self.refused("returns a loss without a gradient")
        (slope,) = torch.autograd.grad(loss.sum(), logps)
        outside = ~mask * torch.tensor([-0.5, 0.3, 0.2, 1.0])[:, None, None]  # (4, 2, 3)
        pi, old, sampled = logps.detach() + outside[:3]
        moved, _ = self(pi, old, sampled, advantages + outside[3], mask)
        if slope[~mask].any() or not torch.equal(moved, loss):
            raise self.refused("depends on tokens where the mask is False")
        if not (slope[0, :2] < 0).all():
            distributed.print_rank0(
                f"warning: --policy_objective {self.name} does not raise the log-prob of a token "
                "with a positive advantage."
            )


def find_policy_objective(
    name: str, arguments: Sequence[str] = (), **settings: Any
) -> PolicyObjective:
    """The objective of that name, or the function of a user's file, which is run.

    Settings are given by name, or as `--objective_args` has them. Raises a UserError for one that
    the objective does not have, or if there is no such objective.
    """
    from common.rewards.functions import load_from_file

    if name in POLICY:
        module = importlib.import_module(f"common.objectives.policy.{name}")
        function = getattr(module, name)
    elif ".py" in name:
        function = load_from_file(name, "--policy_objective")
    else:
        needed = f"one of {', '.join(POLICY)} ({hint(name, POLICY)}), or path/to/file.py:function"
        raise UserError(f"--policy_objective is {name!r}; it must be {needed}.")
    parameters = inspect.signature(function).parameters.values()
    settable = [p for p in parameters if p.kind is p.KEYWORD_ONLY and type(p.default) in TYPES]
    defaults = {p.name: p.default for p in settable}
    tensors = [p.name for p in parameters if p.name not in defaults]
    objective = PolicyObjective(name, function, tensors, defaults | settings)
    if wrong := {*tensors} - {*TENSORS}:
        needed = (
            f"{', '.join(TENSORS)} and settings behind a * with a bool, number or text as default"
        )
        raise objective.refused(f"takes {', '.join(wrong)}; it may take {needed}")
    texts = dict(text.partition("=")[::2] for text in arguments)
    if unknown := [each for each in (*texts, *settings) if each not in defaults]:
        names = ", ".join(defaults) or "none"
        raise objective.refused(f"has no setting {unknown[0]!r}; its settings are {names}")
    for setting, text in texts.items():
        kind = type(defaults[setting])
        try:
            value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            raise UserError(
                f"--objective_args has {setting}={text}; it must be {kind.__name__}."
            ) from None
        objective.settings[setting] = value
    return objective
