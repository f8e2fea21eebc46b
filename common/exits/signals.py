"""Signals that ask a run to stop: the first makes it save and end, a second ends it at once.

Slurm and spot instances announce themselves with SIGTERM or SIGUSR1, a person with Ctrl-C, a
connection or a terminal that is lost with SIGHUP.
"""

import os
import signal
import time

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# torchrun passes on what the whole process group was sent, so a worker gets the same signal twice.
SAME_SIGNAL = 1.0  # seconds

_first: tuple[int, float] | None = None  # which, and when by the monotonic clock


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run ends before its last step, as it should; the text says why and how to go on."""


def listen(*, speaks: bool = True) -> None:
    """Note the first signal for `received`, and leave a second one its default: the process ends.

    SIGHUP stays ignored where `nohup` has set that. `speaks`: this process prints what it will do.
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
