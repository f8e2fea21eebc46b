"""Randomness as a function of counters, not as state.

A random number is a hash of a seed and of what it is for (step, prompt, sample, position), so it
does not depend on the rank, the batch or the order in which it is drawn, and a resumed run needs no
generator state (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The hash is
SplitMix64's finaliser (Steele, Lea and Flood 2014), applied once per counter; integer arithmetic
only, so the bits are the same on every device.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

# SplitMix64's increment (2**64 / golden ratio) and multipliers, as torch's signed 64-bit integers.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
# Standard deviation of a new reward head's weights, for hidden states of size D
HEAD_STDS: dict[str, Callable[[int], float]] = {
    "stiennon": lambda d: (d + 1) ** -0.5,  # a variance of 1 / (D + 1) (Stiennon et al. 2020, B.1)
    "openrlhf": lambda d: 1 / (d + 1),
    "transformers": lambda d: 0.02,  # the `initializer_range` of GPT-2 and most others
    "zeros": lambda d: 0.0,
}


def hash_counters(seed: int, *counters: int | Tensor) -> Tensor:
    """Hash a seed and any number of counters, integers or tensors that broadcast, to 64 bits.

    The order of the counters and their number matter. For a fixed seed and fixed leading counters
    the hash is a bijection of the last counter: distinct values never collide. It is int64 of the
    broadcast shape on the counters' device, of either sign; without any tensor among the counters a
    scalar on the CPU.
    """
    state = _mix(_as_int64(seed) + INCREMENT)
    for counter in counters:
        state = _mix(state + _as_int64(counter) + INCREMENT)
    return state


def uniform(seed: int, *counters: int | Tensor) -> Tensor:
    """Uniform numbers, float64, keyed by seed and counters as in `hash_counters`.

    Midpoints of 2**52 equal cells of (0, 1): log(u) and log(-log(u)) are finite.
    """
    # 52 bits and a half fill float64's significand; with 53 bits the last cell would round to 1.
    cell = _logical_shift_right(hash_counters(seed, *counters), 12)
    return (cell.double() + 0.5) * 2.0**-52


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A seed in [0, 2**63) for a named purpose; Python's own `hash` differs between processes.

    The integer 1 and the string "1" are different purposes.
    """
    key = repr([word if isinstance(word, str) else int(word) for word in (seed, *purpose)])
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**63


def permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Order of the rows in an epoch: 0 .. num_rows - 1 sorted by their hashes, all distinct."""
    keys = hash_counters(derive_seed(seed, "permutation", epoch), torch.arange(num_rows))
    return list(torch.argsort(keys).tolist())


def _as_int64(value: int | Tensor) -> Tensor:
    """Value as an int64 tensor; a Python integer is taken modulo 2**64."""
    if isinstance(value, Tensor):
        assert not value.is_floating_point(), f"counters are integers, not {value.dtype}"
        return value.long()
    # Zero-dimensional CPU tensors combine with tensors of any device without a copy.
    return torch.tensor((int(value) + 2**63) % 2**64 - 2**63)


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit integers; products wrap modulo 2**64."""
    state = (state ^ _logical_shift_right(state, 30)) * MULTIPLIER_1
    state = (state ^ _logical_shift_right(state, 27)) * MULTIPLIER_2
    return state.bitwise_xor(_logical_shift_right(state, 31))


def _logical_shift_right(value: Tensor, num_bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 copies the sign bit."""
    return (value >> num_bits).bitwise_and(2 ** (64 - num_bits) - 1)
