"""Signals that ask a run to stop: the first makes it save and end, a second ends it at once.

Slurm and spot instances announce themselves with SIGTERM or SIGUSR1, a person with Ctrl-C, a
connection or a terminal that is lost with SIGHUP.

Python calls a signal's handler in the main thread, when that comes back from a matrix product or
from waiting for another rank, which may be never. So a thread is told of each signal by its number
in a pipe, at once (`signal.set_wakeup_fd`), and can end the process whatever the main thread does.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# torchrun passes on what the whole process group was sent, so a worker gets the same signal twice.
SAME_SIGNAL = 1.0  # seconds

_first: tuple[int, float] | None = None  # which, and when by the monotonic clock
_is_at_end = False


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run ends before its last step, as it should; the text says why and how to go on."""


def listen(is_lost: Callable[[], bool] = lambda: False, *, speaks: bool = True) -> None:
    """From now on `received` tells of a signal, and only a second one ends the process.

    SIGHUP stays ignored where `nohup` has said so.

    Args:
        is_lost: whether another rank has failed. Then torchrun sends SIGTERM, and this one, which
            may wait for that rank, ends at once.
        speaks: whether this process says what it will do.
    """
    global _first, _is_at_end
    _first, _is_at_end = None, False
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing)
    threading.Thread(target=_watch, args=(reading, is_lost, speaks), daemon=True).start()


def received() -> str:
    """The name of the signal that this process was sent, "" for none."""
    return signal.Signals(_first[0]).name if _first else ""


def stop_no_more() -> None:
    """From now on the first signal changes nothing: the run comes to its end by itself."""
    global _is_at_end
    _is_at_end = True


def _watch(pipe: int, is_lost: Callable[[], bool], speaks: bool) -> None:
    """Note the first signal; end the process at the second, or if there is nothing to wait for."""
    global _first
    while True:
        number, now = os.read(pipe, 1)[0], time.monotonic()
        if number not in STOPPING:
            continue
        if _first is None:
            _first = (number, now)
            if is_lost():
                os._exit(128 + number)  # as a shell reports a process that a signal has ended
            if speaks:
                what = "all steps are made, ending soon" if _is_at_end else "saving soon"
                sys.stderr.write(f"\n{received()}: {what}; a second one ends at once\n")
                sys.stderr.flush()
        elif now - _first[1] > SAME_SIGNAL:
            os._exit(128 + number)
