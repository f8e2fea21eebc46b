"""Measuring the steps of a stage that runs in this process, from outside."""

import cProfile
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pstats import Stats
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from common.run import Run
from experiments.evidence.bench.clock import timer

KERNELS = {
    "attention": r"flash|fmha|attention",
    "matmul": r"gemm|gemv|cutlass|xmma|nvjet|cublas|mm$",
    "optimiser": r"adam",
    "compiled": r"^triton",
    "copy": r"memcpy|memset|copy|\bcat",
}


class Watch:
    """Times and counts of each step; the last one, after `num_timed`, is under profilers."""

    def __init__(self, num_timed: int) -> None:
        """Nothing was measured yet."""
        self.num_timed = num_timed
        # Of each step: wall time, CUDA graphs that were captured, graphs that were compiled
        self.wall_seconds, self.captures, self.compiled = [], [], []
        self.kernels: dict[str, list[float]] = {}  # milliseconds and number, by kind
        self.python_calls = 0  # of functions, those in C too, by the main thread

    @contextmanager
    def steps_of_runs(self) -> Iterator[None]:
        """Measure runs inside the block, and end them without an export."""
        plain, capture, num_captures = Run.steps, torch.cuda.graph.__enter__, [0]

        def counts() -> tuple[float, int, int]:
            # `timer` waits for the GPU first
            return timer(), num_captures[0], counters["stats"]["unique_graphs"]

        def steps(run: Run, *hooks: Any) -> Iterator[int]:
            series = self.wall_seconds, self.captures, self.compiled
            for step in plain(run, *hooks):
                before = counts()
                with self.profiled() if step == self.num_timed else nullcontext():
                    yield step
                for values, x, y in zip(series, before, counts(), strict=True):
                    values.append(y - x)

        def counted(graph: Any) -> Any:
            num_captures[0] += 1
            return capture(graph)

        with (
            mock.patch.object(Run, "steps", steps),
            mock.patch.object(Run, "finish", lambda run, **_: run.logger.close()),
            mock.patch.object(torch.cuda.graph, "__enter__", counted),
        ):
            yield

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Record kernels (on a CPU operators) and Python's calls in the block."""
        name = "CUDA" if torch.cuda.is_available() else "CPU"
        time_name = f"self_{'cpu' if name == 'CPU' else 'device'}_time_total"
        activities = [getattr(torch.profiler.ProfilerActivity, name)]
        with torch.profiler.profile(activities=activities) as profile, cProfile.Profile() as calls:
            yield
        self.python_calls = Stats(calls).total_calls
        for event in profile.key_averages():
            if event.device_type.name == name and not event.is_user_annotation:
                kinds = (k for k, words in KERNELS.items() if re.search(words, event.key.lower()))
                total = self.kernels.setdefault(next(kinds, "other"), [0.0, 0])
                total[0] += getattr(event, time_name) / 1000
                total[1] += event.count
