"""Exact means of metrics over micro-batches and ranks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from common.distributed import all_reduce_sum, from_all_ranks, world_size

# Phases of a step, in order: names for `Accumulator.timed`.
PHASES = ("sample_seconds", "score_seconds", "reference_seconds", "update_seconds")


class Accumulator:
    """Means over micro-batches and ranks, as sums and counts in float64.

    A sum over a count weighs every value equally, so the result does not depend on how the rows
    were split; a mean of means would weigh a short micro-batch like a long one.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Start empty; sums are on `device`, where the totals are computed."""
        self.device = device
        self._sums: dict[str, Tensor] = {}  # name -> (2,) float64: sum, count
        self._on_gpu = torch.device(device).type == "cuda"
        self._phases: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # not yet measured

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1) -> None:
        """Add the 0-d sum of `count` values, which may be 0. Local.

        The sum is detached, and this does not wait for the device.
        """
        if name not in self._sums:
            self._sums[name] = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums = self._sums[name]
        # In place: a Python number becomes a kernel argument, not a blocking copy to the device.
        sums[0] += total.detach() if isinstance(total, Tensor) else total
        sums[1] += count.detach() if isinstance(count, Tensor) else count

    def add_values(self, **values: Tensor | float) -> None:
        """Add values of the whole step, equal on all ranks; together the ranks count once.

        So a run may resume with another number of ranks between two lines.
        """
        share = 1 / world_size()
        for name, value in values.items():
            total = value.double() if isinstance(value, Tensor) else value
            self.add(name, total * share, share)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of this rank's sums and counts, (2,) by name, without the phases."""
        return {name: sums.clone() for name, sums in self._sums.items() if name not in PHASES}

    def restore(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Replace the sums and counts, by name."""
        self._sums = {
            name: torch.tensor(values, dtype=torch.float64, device=self.device)
            for name, values in sums.items()
        }

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to one of `PHASES`.

        A block inside another counts in both. On a GPU the time is the device's, between the start
        and the end of the block's work, and the host does not wait for it.
        """
        assert name in PHASES, name
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

        The ranks exchange their names first, on the host, because they may differ. Names with a
        count of 0 on all ranks are left out. Phases (`PHASES`) are means over all ranks and the
        `num_steps` optimiser steps since the last call; a rank that timed nothing counts as 0.
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
