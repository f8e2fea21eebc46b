"""What a device reaches in matrix products."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.evidence.bench.rows import Shape

NUM_TOKENS = 512  # rows of the model-shaped products
MIN_SECONDS = 0.4  # per shape
MIN_REPEATS = 5


def product_shapes(shape: Shape, num_tokens: int = NUM_TOKENS) -> dict[str, tuple[int, int, int]]:
    """(m, k, n) of the products measured: a square, and those of a training step."""
    width, side = shape.width, 2 * num_tokens
    return {
        "square": (side, side, side),
        "attention in": (num_tokens, width, 3 * width),
        "mlp up": (num_tokens, width, 4 * width),
        "mlp down": (num_tokens, 4 * width, width),
        "head": (num_tokens, width, shape.vocabulary),
    }


def wait_for_gpu() -> None:
    """Wait until the GPU, if there is one, has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(call: Callable[[], object], num_calls: int = 1) -> float:
    """Median seconds of a call, timed `num_calls` at a time: the host runs ahead of a GPU."""
    call()
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or num_calls * sum(seconds) < MIN_SECONDS:
        wait_for_gpu()
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        wait_for_gpu()
        seconds.append((time.perf_counter() - started) / num_calls)
    return statistics.median(seconds)


def rate(m: int, k: int, n: int, num_calls: int = 1, **options: Any) -> float:
    """Median FLOP/s of a product of (m, k) and (k, n); `options` are the tensors'."""
    left, right = torch.randn(m, k, **options), torch.randn(k, n, **options)
    out = torch.empty(m, n, **options)
    return 2 * m * k * n / median_seconds(lambda: torch.mm(left, right, out=out), num_calls)
