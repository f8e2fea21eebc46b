"""Signals that ask a run to stop: the first makes it save and end, a second ends it at once.

Slurm and spot instances announce themselves with SIGTERM or SIGUSR1, a person with Ctrl-C.
"""

import os
import signal
import time
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# torchrun passes on what the whole process group was sent, so a worker gets the same signal twice.
SAME_SIGNAL = 1.0  # seconds

_first: tuple[int, float] | None = None  # which, and when by the monotonic clock


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run was asked to stop and has saved; its text says how to go on."""


def listen() -> None:
    """From now on `received` tells of a signal, which no longer ends the process."""
    global _first
    _first = None
    for number in STOPPING:
        signal.signal(number, _note)


def received() -> str:
    """The name of the signal that this process was sent, "" for none."""
    return signal.Signals(_first[0]).name if _first else ""


def _note(number: int, _frame: FrameType | None) -> None:
    global _first
    now = time.monotonic()
    if _first is None:
        _first = (number, now)
    elif now - _first[1] > SAME_SIGNAL:
        os._exit(128 + number)  # as a shell reports a process that the signal has ended
