"""What this machine reaches in float32 matrix products: what the floors are divided by.

python -m experiments.bench.ceiling --model tiny --output ceiling.json
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from experiments.bench.rows import SHAPES, Shape

NUM_TOKENS = 512  # rows of the model-shaped products
MIN_SECONDS = 0.4  # per shape
MIN_REPEATS = 5


def product_shapes(shape: Shape) -> dict[str, tuple[int, int, int]]:
    """(m, k, n) of the products measured: a square, and those of a training step."""
    width = shape.width
    return {
        "square": (1024, 1024, 1024),
        "attention in": (NUM_TOKENS, width, 3 * width),
        "mlp up": (NUM_TOKENS, width, 4 * width),
        "mlp down": (NUM_TOKENS, 4 * width, width),
        "head": (NUM_TOKENS, width, shape.vocabulary),
    }


def rate(m: int, k: int, n: int) -> float:
    """Median FLOP/s of a float32 product of (m, k) and (k, n)."""
    left, right, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    torch.mm(left, right, out=out)
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or sum(seconds) < MIN_SECONDS:
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds.append(time.perf_counter() - started)
    return 2 * m * k * n / statistics.median(seconds)


def main() -> None:
    """Measure every shape and write the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    rates = {name: rate(*mkn) for name, mkn in product_shapes(SHAPES[arguments.model]).items()}
    arguments.output.write_text(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()
