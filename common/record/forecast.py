"""How long a step and a run will take, from the first step, or from its beginning if it is long."""

import time
from collections.abc import Sequence

SILENCE = 5.0  # seconds of the first step after which its micro-batches so far have to do


class Forecast:
    """The clock of a run's first step.

    It never waits for a GPU, which may be some micro-batches behind the host: it says "about".
    """

    def __init__(self, num_updates: int) -> None:
        """Begin the step; it makes so many updates."""
        self._num_updates = num_updates
        self._num_begun = 0  # updates
        self._began = self._before = time.monotonic()  # the step, and its first update
        self.is_made = False

    def begin_update(self) -> None:
        """Note that the next update begins; what is before the first, as sampling, is over."""
        if not self._num_begun:
            self._before = time.monotonic()
        self._num_begun += 1

    def by_part(self, sizes: Sequence[int], number: int) -> float | None:
        """Seconds of a step after some of an update's micro-batches, of these sizes.

        None where they were so quick that the step's end will tell.
        """
        now = time.monotonic()
        if self.is_made or now - self._began < SILENCE:
            return None
        self.is_made = True
        share = self._num_begun - 1 + sum(sizes[:number]) / sum(sizes)  # of updates
        return self._before - self._began + (now - self._before) * self._num_updates / share

    def by_whole(self) -> float | None:
        """Seconds of the step, at its end; None if they were estimated before."""
        if self.is_made:
            return None
        self.is_made = True
        return time.monotonic() - self._began
