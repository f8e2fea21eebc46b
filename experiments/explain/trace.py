"""What a script's functions are called with, and return, in its first optimiser step.

The script's own `main` runs. While it does, the interpreter reports calls and returns, and those of
the named functions are kept; nothing is computed a second time. When the step ends, the same
forward passes run again on the updated weights, and `main` is left.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pkgutil import resolve_name
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from common.errors import UserError
from common.run import Run


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
    codes = {inspect.unwrap(resolve_name(name)).__code__ for name in functions}
    arguments: dict[FrameType, dict[str, Any]] = {}  # of calls that have not returned

    def add_call(frame: FrameType, event: str, result: Any) -> None:
        if frame.f_code not in codes:
            return
        if event == "call":
            arguments[frame] = dict(frame.f_locals)
        if event == "return" and frame.f_back:
            call = Call(arguments.pop(frame), result, frame.f_back.f_code.co_name)
            trace.calls.setdefault(frame.f_code.co_name, []).append(call)

    def end_step(run: Run, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            for call in trace.forwards:
                inputs = {name: value for name, value in call.arguments.items() if name != "self"}
                trace.after.append(scores_of(run.module(**inputs)))
        raise StepDone

    sys.setprofile(add_call)
    try:
        with mock.patch.object(Run, "end_step", end_step), suppress(StepDone):
            main(config)
    finally:
        sys.setprofile(None)
    if not trace.after:
        raise UserError("the step made no update, because no completion counts in its loss.")
    return trace
