"""What a stage counts in its steps: exact means over micro-batches and ranks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from common.distributed import all_reduce_sum, from_all_ranks, world_size

# The phases of a step, in its order: what `Accumulator.timed` takes, and a profile shows.
PHASES = ("sample_seconds", "score_seconds", "reference_seconds", "update_seconds")


class Accumulator:
    """Means over micro-batches and ranks, as sums and counts in float64.

    A mean of means weighs a short micro-batch like a long one; a sum over a count does not, so the
    result does not depend on how the rows were split.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Start empty; sums live on `device`, where the totals are computed."""
        self.device = device
        self._sums: dict[str, Tensor] = {}  # name -> (2,) float64: sum, count
        self._on_gpu = torch.device(device).type == "cuda"
        self._phases: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # not yet measured

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1) -> None:
        """Add the 0-d sum of `count` values, 0 where this rank has none. Local.

        What is added is detached, and does not wait for the device.
        """
        if name not in self._sums:
            self._sums[name] = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums = self._sums[name]
        # In place: a Python number becomes a kernel argument, not a blocking copy to the device.
        sums[0] += total.detach() if isinstance(total, Tensor) else total
        sums[1] += count.detach() if isinstance(count, Tensor) else count

    def add_values(self, **values: Tensor | float) -> None:
        """Add values of the whole step, each the same on every rank, which count once together.

        So a run may be resumed between two lines with another number of ranks.
        """
        share = 1 / world_size()
        for name, value in values.items():
            total = value.double() if isinstance(value, Tensor) else value
            self.add(name, total * share, share)

    def total(self, name: str) -> Tensor:
        """This rank's sum so far, a float64 scalar on the device."""
        return self._sums[name][0]

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of this rank's sums and counts, (2,) by name, but for the times of phases."""
        return {name: sums.clone() for name, sums in self._sums.items() if name not in PHASES}

    def restore(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Go on from the sum and count of each name."""
        self._sums = {
            name: torch.tensor(values, dtype=torch.float64, device=self.device)
            for name, values in sums.items()
        }

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to one of `PHASES`, and label the block in a profile.

        Entered several times in a step, a phase is the sum; a block inside another counts in both.
        Does not wait for a GPU: there, the time is from when the device gets to the block until it
        has done the block's work, so phases one after another do not overlap.
        """
        assert name in PHASES, f"{name!r} is not a phase; those of PHASES are {PHASES}"
        # A label costs 6 microseconds even when no profiler runs, asking for one 0.05.
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        with torch.profiler.record_function(name) if profiled else nullcontext():
            if self._on_gpu:
                started = torch.cuda.Event(enable_timing=True)
                ended = torch.cuda.Event(enable_timing=True)
                started.record()
                yield
                ended.record()
                self._phases.append((name, started, ended))
            else:
                began = time.perf_counter()
                yield
                self.add(name, time.perf_counter() - began)

    def reduce(self, num_steps: int = 1) -> dict[str, float]:
        """Global means by sorted name; then empty. Collective: one all-reduce, one device wait.

        The ranks exchange their names first, on the host: one may be missing on some. Names that
        counted nothing on any rank are left out. Phases (`PHASES`) are means over the `num_steps`
        optimiser steps since the last call and over all ranks, 0 seconds where nothing was timed.
        """
        assert num_steps > 0, num_steps
        for name, started, ended in self._phases:
            ended.synchronize()  # elapsed_time, in milliseconds, raises before the event has passed
            self.add(name, started.elapsed_time(ended) / 1000)
        self._phases = []
        names = sorted(set(from_all_ranks(list(self._sums))))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self.device)
        table = torch.stack([self._sums.get(name, nothing) for name in names])  # (names, 2)
        self._sums = {}
        reduced = all_reduce_sum(table).tolist()
        return {
            name: total / (num_steps * world_size() if name in PHASES else count)
            for name, (total, count) in zip(names, reduced, strict=True)
            if count != 0
        }
