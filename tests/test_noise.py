"""Claim: noise is a function of seed and counters.

The bits are SplitMix64's (its published outputs, and Python's unbounded integers), the numbers are
uniform and uncorrelated along every counter, and neither the shape nor the order of the batch nor
the process that asks changes them. About `common.noise`.
"""

import itertools

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import noise

GOLDEN = 0x9E3779B97F4A7C15
INT64 = st.integers(-(2**63), 2**63 - 1)


def unsigned(value: torch.Tensor) -> int:
    return value.item() % 2**64


def splitmix64(state: int) -> int:
    """SplitMix64's output function in Python integers, which have no sign bit to spread."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def chi_square(values: torch.Tensor, num_bins: int) -> float:
    """Chi-square statistic of values in (0, 1), standardised: mean 0, deviation 1 if uniform."""
    counts = torch.histc(values, bins=num_bins, min=0, max=1)
    expected = values.numel() / num_bins
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - (num_bins - 1)) / (2 * (num_bins - 1)) ** 0.5


def test_published_splitmix64_outputs():
    # The first outputs of the reference generator seeded with 0; its state grows by the increment.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [unsigned(noise.hash_counters(k * GOLDEN)) for k in range(4)] == published


@settings(max_examples=200, deadline=None)
@given(seed=INT64, counters=st.lists(INT64, max_size=4))
def test_chain_of_counters_matches_unbounded_integers(seed: int, counters: list[int]):
    state = splitmix64((seed + GOLDEN) % 2**64)
    for counter in counters:
        state = splitmix64((state + counter + GOLDEN) % 2**64)
    assert unsigned(noise.hash_counters(seed, *counters)) == state
    tensors = [torch.tensor([counter, 0]) for counter in counters]
    if tensors:
        assert unsigned(noise.hash_counters(seed, *tensors)[0]) == state
    with pytest.raises(AssertionError, match="integers"):
        noise.hash_counters(0, torch.tensor([0.5]))


def test_uniform_stays_inside_the_open_interval_at_both_ends(monkeypatch: pytest.MonkeyPatch):
    lowest_and_highest = torch.tensor([0, -1])  # no bit set, every bit set
    monkeypatch.setattr(noise, "hash_counters", lambda seed: lowest_and_highest)
    low, high = noise.uniform(0)
    assert low.dtype == torch.float64
    assert low == 2.0**-53
    assert high == 1 - 2.0**-53
    assert torch.isfinite(torch.log(-torch.log(torch.stack([low, high])))).all()


@pytest.mark.parametrize("axis", ["seed", "first", "middle", "last"])
def test_uniform_along_every_counter(axis: str):
    index = torch.arange(40_000)
    values = {
        "seed": lambda: torch.stack([noise.uniform(seed, 1, 2, 3) for seed in range(4000)]),
        "first": lambda: noise.uniform(11, index, 2, 3),
        "middle": lambda: noise.uniform(11, 1, index, 3),
        "last": lambda: noise.uniform(11, 1, 2, index),
    }[axis]()
    assert abs(chi_square(values, 100)) < 4
    centred = values - 0.5
    for lag in (1, 2, 64):  # neighbours along the counter
        correlation = 12 * (centred[lag:] * centred[:-lag]).mean().item()
        assert abs(correlation) < 4 / len(values) ** 0.5, lag


def test_pairs_of_counters_are_uncorrelated():
    grid = noise.uniform(3, torch.arange(300)[:, None], torch.arange(300)[None])  # rows, columns
    for other in (grid.T, noise.uniform(4, torch.arange(300)[:, None], torch.arange(300)[None])):
        correlation = 12 * ((grid - 0.5) * (other - 0.5)).triu(1).sum() / (300 * 299 / 2)
        assert abs(correlation) < 4 / (300 * 299 / 2) ** 0.5
    assert abs(chi_square(grid.flatten(), 100)) < 4


def test_value_does_not_depend_on_shape_order_or_what_else_is_drawn():
    prompts, samples, positions = torch.arange(5), torch.arange(3), torch.arange(4)
    whole = noise.uniform(9, prompts[:, None, None], samples[:, None], positions)
    assert whole.shape == (5, 3, 4)
    state = torch.get_rng_state()
    for prompt, sample, position in itertools.product(range(5), range(3), range(4)):
        assert noise.uniform(9, prompt, sample, position) == whole[prompt, sample, position]
    order = torch.tensor([3, 0, 4])
    assert torch.equal(
        noise.uniform(9, order[:, None, None], samples[:, None], 2), whole[order][:, :, 2:3]
    )
    assert torch.equal(torch.get_rng_state(), state), "torch's generator is not touched"


def test_derived_seeds_separate_purposes_and_types():
    purposes = [(), ("a",), ("a", "b"), ("ab",), ("b", "a"), (1,), ("1",), (1, 2), (12,), ("1, 2",)]
    seeds = [noise.derive_seed(seed, *purpose) for seed in (0, 1) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # It is the same in another process.
    program = "from common.noise import derive_seed; print(derive_seed(3, 'sampling', 7))"
    for salt in ("1", "2"):
        assert int(tiny.output_of(program, hash_seed=salt)) == noise.derive_seed(3, "sampling", 7)


@settings(max_examples=50, deadline=None)
@given(num_rows=st.integers(0, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_permutation_has_every_row_once(num_rows: int, seed: int, epoch: int):
    order = noise.permutation(num_rows, seed, epoch)
    assert sorted(order) == list(range(num_rows))
    assert order == noise.permutation(num_rows, seed, epoch)


def test_permutation_differs_by_epoch_and_seed_and_is_unbiased():
    assert noise.permutation(50, 0, 0) != noise.permutation(50, 0, 1)
    assert noise.permutation(50, 0, 0) != noise.permutation(50, 1, 0)
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for epoch in range(4800):
        counts[tuple(noise.permutation(4, 7, epoch))] += 1
    statistic = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert abs(statistic - 23) / 46**0.5 < 4, "all 24 orders equally likely"


def test_deviations_of_a_new_head_by_hand():
    stds = {name: std(99) for name, std in noise.HEAD_STDS.items()}
    assert stds == {"stiennon": 0.1, "openrlhf": 0.01, "transformers": 0.02, "zeros": 0.0}
