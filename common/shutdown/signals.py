"""Signals that stop a run: after the first it saves and ends, after a second it ends at once.

Slurm and spot instances send SIGTERM or SIGUSR1, Ctrl-C sends SIGINT, a lost connection or terminal
SIGHUP.
"""

import os
import signal
import time

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A signal to the process group reaches a worker twice: torchrun passes it on.
SAME_SIGNAL = 1.0  # seconds

_first: tuple[int, float] | None = None  # the signal, and its time by the monotonic clock


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run ends before its last step on request; the text says why and how to go on."""


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
