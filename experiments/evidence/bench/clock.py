"""Seconds of what runs on a GPU, if there is one."""

import time
from collections.abc import Callable
from statistics import median

import torch


def timer() -> float:
    """Seconds of the clock, once the GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(call: Callable[[], object], num_calls: int = 20) -> float:
    """Median seconds of a call, timed `num_calls` at a time: the host runs ahead of a GPU."""
    call()
    seconds = []
    for _ in range(5):
        started = timer()
        for _ in range(num_calls):
            call()
        seconds.append((timer() - started) / num_calls)
    return median(seconds)
