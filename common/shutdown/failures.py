"""Messages about a failed rank: its step, and whether another rank is the cause."""

import sys
from pathlib import Path

import torch.distributed as dist

_progress: tuple[int, int] | None = None  # finished steps, steps of the run


def note_step(finished: int, total: int) -> None:
    """Remember the number of finished optimiser steps, for a later message."""
    global _progress
    _progress = (finished, total)


def place(rank: int) -> str:
    """The first line of an error message: rank and step; "" before the first step."""
    if _progress is None:
        return ""
    (finished, total), script = _progress, Path(sys.argv[0]).stem  # a bar may be in the line above
    return f"\nrank {rank} of {script}, after step {finished} of {total}:\n"


def lost_peers(error: BaseException | None) -> bool:
    """Whether a collective failed because a rank has ended, hangs or cannot be reached."""
    while error is not None:
        # gloo's errors are plain RuntimeErrors that begin with a line of its source.
        is_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
        if is_gloo or isinstance(error, dist.DistError):
            return True
        error = error.__cause__ or error.__context__
    return False
