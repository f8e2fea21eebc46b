"""What a script's functions are called with, and return, in its first optimiser step.

The script's own `main` runs. While it does, the named functions are replaced by wrappers that call
them and keep their arguments and results; nothing is computed a second time. When the step ends,
the same forward passes run again on the updated weights, and `main` is left.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from common.errors import UserError
from common.run import Run

OURS = ("common.", "train_")  # how the names of the project's modules begin


class StepDone(Exception):  # noqa: N818 - leaves a script after its first step
    """The step that is explained has ended."""


@dataclass(frozen=True)
class Call:
    """A call of a traced function."""

    arguments: dict[str, Any]  # by name
    result: Any
    caller: str  # the function that called it


@dataclass
class Trace:
    """The calls of a step by the function's name, in order, and the forward passes after it."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    after: list[Tensor] = field(default_factory=list)  # (B, C), or rewards (B,)

    def of(self, function: str, caller: str = "") -> list[Call]:
        """The calls of a function, by default from everywhere."""
        calls = self.calls.get(function, [])
        return [call for call in calls if caller in ("", call.caller)]

    @property
    def forwards(self) -> list[Call]:
        """The forward passes whose backward pass gave the gradient, one of each micro-batch."""
        return [call for call in self.of("forward") if scores_of(call.result).requires_grad]

    @property
    def batches(self) -> list[Any]:
        """The micro-batches of the step."""
        return [call.arguments["batch"] for call in self.forwards]


def scores_of(output: Any) -> Tensor:
    """Log-probs (B, C) of a policy's forward pass, or rewards (B,) of a reward model's."""
    scores: Tensor = getattr(output, "token_logps", output)
    return scores


def trace_step(main: Callable[[Any], None], config: Any, functions: Sequence[str]) -> Trace:
    """Run a script's `main` for one step, and trace the functions, by their dotted names."""
    trace = Trace()

    def end_step(run: Run, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            for call in trace.forwards:
                inputs = {name: value for name, value in call.arguments.items() if name != "self"}
                trace.after.append(scores_of(run.module(**inputs)))
        raise StepDone

    with ExitStack() as patches:
        for name in functions:
            function, owner = resolve_name(name), resolve_name(name.rpartition(".")[0])
            replacement = recorder(function, trace)
            modules = [sys.modules[name] for name in [*sys.modules] if name.startswith(OURS)]
            for place in (owner, *modules):
                for attribute in [a for a, value in vars(place).items() if value is function]:
                    patches.enter_context(mock.patch.object(place, attribute, replacement))
        patches.enter_context(mock.patch.object(Run, "end_step", end_step))
        with suppress(StepDone):
            main(config)
    if not trace.after:
        raise UserError("the step made no update, because no completion counts in its loss.")
    return trace


def recorder(function: Any, trace: Trace) -> Any:
    """A function that calls another one and adds the call to the trace."""
    calls = trace.calls.setdefault(function.__name__, [])
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        calls.append(Call(arguments, result, sys._getframe(1).f_code.co_name))
        return result

    return wrapper
