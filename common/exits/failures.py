"""What ended a run: one rank says it, with the step; its peers keep quiet.

When a rank fails, its sockets close, and the next collective of every peer fails after it: N ranks
would print N tracebacks, N - 1 of them about each other. Here a rank enters its cause in the store
of the process group before its sockets close, and only the first to do so speaks. Under torchrun
that store lives in the first host's agent and outlives the ranks.

A collective of NCCL that waits too long raises nothing: torch's watchdog thread ends the process
(SIGABRT), and what it leaves is in docs/many_nodes.md.
"""

import errno
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from common.errors import gist

Answer = TypeVar("Answer")

CAUSE = "failure/cause"
HEARD = "failure/heard"  # and a rank: it has failed too
TOLD = "failure/told"  # and a host: the rank that has printed the cause there
STORE_TIMEOUT = 5.0  # seconds; the host of the store may be the one that is gone
# What is not the cause stays this long: torchrun ends the others within 0.1 s of the first exit,
# and names as the root cause whoever ended before that.
LINGER = 1.0  # seconds
FULL = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "disk quota exceeded"}
PROJECT = Path(__file__).resolve().parents[2]

_progress: tuple[int, int] | None = None  # finished steps, steps of the run


def note_step(finished: int, total: int) -> None:
    """Remember how many of the run's optimiser steps are finished, for a later message."""
    global _progress
    _progress = (finished, total)


def report(error: BaseException, store: Any, rank: int, world_size: int, host: int = 0) -> int:
    """Say on stderr what ended this rank, unless an earlier failure explains it. Not collective.

    On every other host the first rank to notice repeats the cause in a line, since hosts may have
    logs of their own. The store is that of the process group, None before there is one.

    Returns:
        The exit status: 130 after Ctrl-C, what `sys.exit` was given, else 1.
    """
    what, details = description(error)
    cause = f"rank {rank} {what}"
    first, is_news = claim(store, rank, host, cause)
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if first == cause or (not first and not (is_interrupt and rank != 0)):
        if lost_peers(error):
            cause += missing(error, store, world_size) if first else "; nor does the store answer"
        say(f"{cause}\n{details}".rstrip())
    elif first and not (is_interrupt or lost_peers(error)) and not first.endswith(f" {what}"):
        say(f"{cause} (after {' '.join(first.split()[:3])})")
    elif is_news:
        say(f"rank {rank} ends: {first}")
    if not first.startswith(f"rank {rank} ") or lost_peers(error):
        time.sleep(LINGER)
    return exit_status(error)


def say(text: str) -> None:
    """Print to stderr, at once and in one piece."""
    sys.stderr.write(f"\n{text}\n")  # the first: a bar may have left the cursor in its line
    sys.stderr.flush()


def claim(store: Any, rank: int, host: int, cause: str) -> tuple[str, bool]:
    """Enter a cause unless there is one; not collective.

    Returns:
        The cause that is there, "" where no store answers; whether nobody on this host has got it
        before.
    """

    def enter() -> tuple[str, bool]:
        store.set(f"{HEARD}/{rank}", "yes")
        first = store.compare_set(CAUSE, "", cause).decode()
        told = store.compare_set(f"{TOLD}/{host}", "", str(rank)).decode()
        return first, told == str(rank)

    return (asked(enter) if store is not None else None) or ("", False)


def is_claimed_by_peer(store: Any, rank: int) -> bool:
    """Whether another rank has entered a cause, as far as the store answers. Not collective."""
    if store is None:
        return False
    cause = asked(lambda: store.get(CAUSE).decode() if store.check([CAUSE]) else "")
    return bool(cause) and not str(cause).startswith(f"rank {rank} ")


def missing(error: BaseException, store: Any, world_size: int) -> str:
    """Which ranks did not fail although this one waited in vain: they hang, or are cut off."""
    if "timed out" not in str(error).lower():
        return ""  # a connection broke: others may not have noticed yet
    time.sleep(LINGER / 2)  # others do so at about the same time

    def unheard() -> list[str]:
        return [str(r) for r in range(world_size) if not store.check([f"{HEARD}/{r}"])]

    ranks = asked(unheard)
    return f"; no word from rank {', '.join(ranks)}" if ranks else ""


def asked(question: Callable[[], Answer]) -> Answer | None:
    """What the store answers, None if it does not within `STORE_TIMEOUT`.

    Asked from a thread that may be left behind: some of the store's calls wait for ever.
    """
    answers: list[Answer] = []

    def ask() -> None:
        try:
            answers.append(question())
        except RuntimeError:  # the store's errors, of which torch has several kinds
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_TIMEOUT)
    return answers[0] if answers else None


def description(error: BaseException) -> tuple[str, str]:
    """What happened, to be read after "rank 3", and the traceback where it says more than that."""
    if isinstance(error, KeyboardInterrupt):
        return f"was interrupted {place()}", ""
    if isinstance(error, SystemExit):
        return f"left {place()}: sys.exit({error.code!r}) was called", ""
    if full := disk_full(error):
        return f"stopped {place()}: {full}.", ""
    whole = "".join(traceback.format_exception(error))
    if not lost_peers(error):
        return f"failed {place()}: {type(error).__name__}: {gist(error)}", whole
    said = gloo_text(error)
    # gloo begins with the line of its source, and may go on with advice.
    text = re.sub(r"^\[[^\]]*\]\s*", "", said or gist(error)).split(". ")[0]
    where = "(a process ended or hangs, or a host is unreachable)"
    return f"lost its peers {place()} {where} {origin(error)}: {text}", "" if said else whole


def place() -> str:
    """Where in the run this process is: "at step 12 of train_grpo"; without steps, its name."""
    script = Path(sys.argv[0]).stem
    if _progress is None:
        return f"in {script}"
    finished, total = _progress
    if finished >= total:
        return f"after step {total}, the last of {script}"
    return f"at step {finished + 1} of {script}"


def aside(rank: int) -> str:
    """Who is at which step, as a line to be added; "" before the first step."""
    return f"\n  (rank {rank}, {place()})" if _progress else ""


def origin(error: BaseException) -> str:
    """The innermost line of this project that an exception passed through: "(file.py, line 3)".

    Not one of `distributed.py`: who called for a collective says more than what makes it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).resolve().is_relative_to(PROJECT)]
    ours = [f for f in ours if not {"site-packages", "distributed.py"} & {*Path(f.filename).parts}]
    frame = ([*frames, *ours] or [None])[-1]
    return f"({Path(frame.filename).name}, line {frame.lineno})" if frame else ""


def disk_full(error: BaseException) -> str:
    """What a full disk or quota did, "" for any other exception."""
    for cause in chain(error):
        for number, text in FULL.items():
            # Libraries that are not written in Python pass on the text only.
            if getattr(cause, "errno", None) == number or text in str(cause).lower():
                file = getattr(cause, "filename", None)
                where = f"while writing {file}" if file else origin(cause) or origin(error)
                return f"{text} {where}".rstrip()
    return ""


def lost_peers(error: BaseException) -> bool:
    """Whether a collective or the store failed, which a peer or the network has done."""
    return bool(gloo_text(error)) or any(isinstance(e, dist.DistError) for e in chain(error))


def gloo_text(error: BaseException) -> str:
    """What gloo said on one line, "" where it said nothing: its errors are plain RuntimeErrors."""
    for cause in chain(error):
        if isinstance(cause, RuntimeError) and "gloo" in str(cause) and ".cc:" in str(cause):
            return " ".join(str(cause).split())
    return ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """What caused an exception, the deepest first, and itself; of a checkpoint, on every rank."""
    below = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if below is not None:
        yield from chain(below)
    if isinstance(error, CheckpointException):
        for cause, _ in error.failures.values():
            yield from chain(cause)
    yield error


def exit_status(error: BaseException) -> int:
    """What the process ends with: never 0."""
    if isinstance(error, KeyboardInterrupt):
        return 130  # as a shell reports SIGINT
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) and 0 < code < 256 else 1
