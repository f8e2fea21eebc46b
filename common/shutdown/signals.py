"""Signals that stop a run: after the first it saves and ends, after a second it ends at once.

Slurm and spot instances send SIGTERM or SIGUSR1, Ctrl-C sends SIGINT, a lost connection or terminal
SIGHUP.
"""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from common import distributed

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A signal to the process group reaches a worker twice: torchrun passes it on.
SAME_SIGNAL = 1.0  # seconds

_first: tuple[int, float] | None = None  # the signal, and its time by the monotonic clock


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run ends before its last step on request; the text says why and how to go on."""

    def __init__(self, text: str, number: int = 0) -> None:
        """Take the text, and the signal, which makes the exit status as in a shell."""
        super().__init__(text)
        # After SIGUSR1 Slurm queues the job again: it is no failure.
        self.status = 128 + number if number not in (0, signal.SIGUSR1) else 0


def listen(*, speaks: bool = True) -> None:
    """Record the first signal for `received`; a second one ends the process, as by default.

    Under `nohup` SIGHUP stays ignored. `speaks`: this process prints that it is ending.
    """
    global _first
    _first = None

    def note(number: int, _: object) -> None:
        global _first
        if _first is None:
            _first = (number, time.monotonic())
            if speaks:  # `print` fails where the signal comes amid another print
                text = f"\n{received()}: saving and ending soon; a second one ends at once\n"
                os.write(2, text.encode())
        elif time.monotonic() - _first[1] > SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)


def received() -> str:
    """The name of the signal that this process was sent, "" for none."""
    return signal.Signals(_first[0]).name if _first else ""


class StopVote:
    """Agreement of the ranks to stop, or to save. Every rank calls it equally often."""

    def __init__(self) -> None:
        """Start without a vote."""
        self._pending: tuple[Any, torch.Tensor] | None = None  # an all-reduce, and its maxima (2,)

    def agreed_signal(self, *, wants_save: bool = False, at_once: bool = False) -> int:
        """The signal that any rank had received at the last call, 0 for none. Collective.

        Of several ones the highest number. No rank waits for another. `at_once`: wait for all ranks
        and count this call instead, before something long. `wants_save` counts for `agreed_save`.
        """
        mine = _first[0] if _first else 0
        if distributed.world_size() == 1:
            return mine
        votes = torch.tensor([mine, wants_save])
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True)
        calls = [self._pending, (work, votes)]
        self._pending = calls[1]
        ended = [call for call in calls[: 1 + at_once] if call is not None]
        for work, _ in ended:  # every collective is waited for
            work.wait()
        return int(ended[-1][1][0]) if ended else 0

    def agreed_save(self) -> bool:
        """Whether any rank wanted a save at the last call of `agreed_signal`. Collective.

        The ranks exchanged that before a forward and a backward pass: none waits long for another.
        """
        self.end()
        return self._pending is not None and bool(self._pending[1][1])

    def end(self) -> None:
        """Wait for the last vote."""
        if self._pending is not None:
            self._pending[0].wait()
