"""Claim: micro-batches hold every completion once, within the limits, as many on every rank.

The tokens a limit counts are those of the batch that is made. Rows are dealt out by length; what
the ranks hold together does not depend on their number. About `common.data`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import distributed
from common.config.stages import CommonConfig
from common.data import (
    BatchOrder,
    PromptGroup,
    collate,
    cost,
    cut_group,
    filled,
    fits,
    micro_batches,
    pack_micro_batches,
)
from common.errors import UserError
from common.evaluation.scoring import distinct_completions
from experiments.evidence.bench.fixture import PROMPT_LENGTHS, RESPONSE_LENGTHS
from experiments.evidence.bench.rows import MAX_PROMPT_LENGTH

pytestmark = pytest.mark.usefixtures("process_group")

LAYOUTS = ("shared_prefix", "padded")
CONFIGS = st.builds(
    lambda layout, tokens, rows: CommonConfig(
        output_dir="unused", layout=layout, micro_batch_tokens=tokens, micro_batch_size=rows
    ),
    st.sampled_from(LAYOUTS),
    st.integers(1, 120),
    st.integers(1, 8),
)
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=9)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "all_reduce_max", lambda tensor: tensor)


def in_step(monkeypatch: pytest.MonkeyPatch, ranks: list[Callable[[], list[Any]]]) -> list[Any]:
    """Results of each rank's function if all ranks know the largest number of packs."""
    counts: list[int] = []
    for most in (None, counts):
        with monkeypatch.context() as patch:
            if most is None:
                patch.setattr(distributed, "all_reduce_max", lambda n: counts.append(int(n)) or n)
            else:
                patch.setattr(distributed, "all_reduce_max", lambda _: torch.tensor(max(counts)))
            results = [function() for function in ranks]
    return results


def piece_of(first: int, prompt_length: int, lengths: list[int], weight: int = 1) -> PromptGroup:
    slots = list(range(first, first + len(lengths)))
    return PromptGroup([2] * prompt_length, [[3] * n for n in lengths], slots, weight)


@given(config=CONFIGS, prompt_length=st.integers(1, 30), lengths=LENGTHS)
def test_a_group_is_cut_into_as_few_equal_pieces_as_fit(config, prompt_length, lengths):
    whole = piece_of(10, prompt_length, lengths)
    groups = cut_group(whole.prompt_ids, whole.completions, whole.slots, config)
    assert [p for group in groups for p in group.slots] == whole.slots
    assert [ids for group in groups for ids in group.completions] == whole.completions
    assert all(group.weight == len(group.slots) == len(group.completions) for group in groups)
    assert all(group.prompt_ids == whole.prompt_ids for group in groups)
    sizes = [len(group.slots) for group in groups]
    assert set(sizes[:-1]) <= {sizes[0]}
    assert 1 <= sizes[-1] <= sizes[0]
    assert sizes[0] == 1 or all(fits([group], config) for group in groups)
    for fewer in range(1, len(groups)):  # none of which would do
        size = -(-len(lengths) // fewer)
        pieces = [
            piece_of(0, prompt_length, lengths[i : i + size], len(lengths[i : i + size]))
            for i in range(0, len(lengths), size)
        ]
        assert not all(fits([piece], config) for piece in pieces)


@given(
    config=CONFIGS,
    groups=st.lists(st.tuples(st.integers(1, 30), LENGTHS, st.integers(1, 4)), max_size=8),
)
def test_packs_hold_every_place_once_within_the_limits(config, groups):
    groups = [piece_of(100 * i, *group) for i, group in enumerate(groups)]
    packed = pack_micro_batches(groups, config)
    slots = sorted(slot for pack in packed for group in pack for slot in group.slots)
    assert slots == [slot for group in groups for slot in group.slots]
    for pack in packed:
        assert pack
        assert len(pack) == 1 or fits(pack, config)
    costs = [cost([group], config.layout) for pack in packed for group in pack]
    assert costs == sorted(costs, reverse=True)  # neighbours are of like length
    for pack, following in zip(packed, packed[1:], strict=False):
        assert not fits([*pack, following[0]], config)  # a pack is full before the next begins


@given(
    config=CONFIGS,
    groups=st.lists(st.tuples(st.integers(1, 30), LENGTHS), max_size=12),
)
def test_packs_that_are_dealt_hold_every_place_once_within_the_limits(config, groups):
    config = replace(config, compile="true", layout="shared_prefix")
    groups = [piece_of(100 * i, *group) for i, group in enumerate(groups)]
    packed = pack_micro_batches(groups, config)
    slots = sorted(slot for pack in packed for group in pack for slot in group.slots)
    assert slots == [slot for group in groups for slot in group.slots]
    assert all(len(pack) == 1 or fits(pack, config) for pack in packed)
    assert len(packed) == len(pack_micro_batches(groups, replace(config, compile="false")))


def test_packs_are_dealt_like_cards_by_hand():
    """Of 9, 8, ..., 2 tokens 30 would fit at first, and leave 14. Every other round is reversed."""
    config = tiny.train_config(compile="true", micro_batch_tokens=30, micro_batch_size=8)
    groups = [piece_of(n, n, [1]) for n in range(1, 9)]
    packed = pack_micro_batches(groups, config)
    assert [[1 + len(group.prompt_ids) for group in pack] for pack in packed] == [
        [9, 5, 6, 2],
        [8, 4, 7, 3],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_limits_are_inclusive(layout: str):
    groups = [piece_of(0, 3, [4]), piece_of(1, 3, [4])]  # of 7 tokens each
    for tokens, rows, is_together in ((14, 2, True), (13, 2, False), (14, 1, False)):
        config = CommonConfig(
            output_dir="x", layout=layout, micro_batch_tokens=tokens, micro_batch_size=rows
        )
        assert fits(groups, config) == is_together
        assert len(pack_micro_batches(groups, config)) == 2 - is_together


def test_a_filler_has_one_completion_unless_more_are_asked_for(monkeypatch):
    monkeypatch.setattr(distributed, "all_reduce_max", lambda tensor: tensor + 1)
    _, (filler,) = pack_micro_batches([piece_of(0, 3, [4])], tiny.train_config())
    assert (len(filler.completions), filler.slots) == (1, [])


def test_a_batch_that_the_ranks_cannot_share_is_refused(monkeypatch):
    config = tiny.train_config(batch_size=3)
    examples = tiny.ragged_examples([(2,), (3,), (4,)])
    assert BatchOrder.of_training(config, examples).batch_size == 3
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(UserError, match="--batch_size is 3, which 2 processes cannot share"):
        BatchOrder.of_training(config, examples)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=CONFIGS,
    ranks=st.lists(
        st.lists(st.tuples(st.integers(1, 30), LENGTHS), max_size=5), min_size=1, max_size=4
    ),
    num_completions=st.integers(1, 3),
)
def test_every_rank_has_as_many_packs(monkeypatch, config, ranks, num_completions):
    def one(groups: list[tuple[int, list[int]]]) -> Callable[[], list[list[PromptGroup]]]:
        groups = [piece_of(100 * i, *group) for i, group in enumerate(groups)]
        return lambda: pack_micro_batches(groups, config, num_completions)

    all_packs = in_step(monkeypatch, [one(groups) for groups in ranks])
    alone = [len(one(groups)()) for groups in ranks]
    assert {len(packed) for packed in all_packs} == {max(alone)}
    for packed, num_own in zip(all_packs, alone, strict=True):
        for pack in packed[num_own:]:
            (filler,) = pack
            assert filler.slots == []
            assert len(filler.completions) == num_completions
            batch = collate(pack, config, 0)
            assert not batch.is_real.any()
            assert batch.num_tokens == 0
            assert batch.input_ids.numel() <= 2 * num_completions


@given(
    layout=st.sampled_from(LAYOUTS),
    groups=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4),
    num_completions=st.integers(1, 3),
)
def test_cost_is_the_size_of_the_batch(layout, groups, num_completions):
    groups = [
        piece_of(10 * i, prompt, [length + k for k in range(num_completions)])
        for i, (prompt, length) in enumerate(groups)
    ]
    batch = collate(groups, tiny.train_config(layout=layout), 0)
    assert cost(groups, layout) == batch.input_ids.numel()
    assert batch.slots.tolist() == [slot for group in groups for slot in group.slots]
    for row, ids in enumerate(ids for group in groups for ids in group.completions):
        assert batch.completion_ids[row][batch.completion_mask[row]].tolist() == ids


@given(
    groups=st.lists(st.tuples(st.integers(1, 60), LENGTHS), min_size=1, max_size=40),
    is_uniform=st.booleans(),
)
def test_groups_that_count_nowhere_fill_a_batch_up(groups, is_uniform):
    if is_uniform:
        groups = [(prompt, [length]) for prompt, (length, *_) in groups]
    config = tiny.train_config(compile="true", max_prompt_length=60, max_completion_length=20)
    real = [piece_of(100 * i, *group) for i, group in enumerate(groups)]
    batch, plain = collate(real, config, 0), collate(real, replace(config, compile="false"), 0)
    fillers = filled(real, config)[len(real) :]
    assert filled(real, config)[: len(real)] == real
    for filler in fillers:
        assert len(filler.prompt_ids) <= config.max_prompt_length
        assert all(len(ids) <= config.max_completion_length for ids in filler.completions)
    num_tokens, most = plain.input_ids.shape[1], max(len(group.completions) for group in real)
    unit = batch.input_ids.shape[1] & -batch.input_ids.shape[1]  # the power of two that divides it
    assert unit >= min(1024, num_tokens / 16)
    added = batch.input_ids.shape[1] - num_tokens
    assert added < 1.5 * max(4, num_tokens / 8) + len(fillers)
    assert (len(real) + len(fillers)) % (8 if most < 2 else 4) == 0
    assert len(batch.slots) == (len(real) + len(fillers)) * most
    assert batch.is_real.tolist() == [True] * len(plain.slots) + [False] * len(
        batch.slots[len(plain.slots) :]
    )
    rows, width = plain.completion_mask.shape
    assert torch.equal(batch.completion_mask[:rows, :width], plain.completion_mask)
    assert batch.num_tokens == plain.num_tokens
    assert batch.completion_mask.shape[1] == config.max_completion_length


def test_the_limits_of_a_compiled_batch_are_those_of_its_largest_group():
    """Kernels are chosen by them, and must not change with the lengths of a batch."""
    config = tiny.train_config(compile="true", max_prompt_length=60, max_completion_length=20)
    layout = collate([piece_of(0, 5, [2]), piece_of(9, 7, [1] * 6)], config, 0).layout
    assert layout.longest == 60 + 20
    assert layout.largest >= 6 * 20  # of a group that fills up maybe more
    assert layout.largest % 20 == 0


def test_a_long_row_is_filled_up_to_a_multiple_of_1024():
    config = tiny.train_config(compile="true", max_prompt_length=1000, max_completion_length=20)
    groups = [piece_of(i, 1000, [20]) for i in range(39)]
    fillers = filled(groups, config)[39:]
    added = sum(len(one.prompt_ids) + sum(map(len, one.completions)) for one in fillers)
    assert (39 * 1020 + added) % 1024 == 0
    assert added < 1.5 * 1024 + len(fillers)


def test_prompts_of_one_token_are_filled_up_too():
    """Fillers of one token each would never make the batch a multiple of four."""
    batch = collate(
        [piece_of(0, 1, [2])], tiny.train_config(compile="true", max_prompt_length=1), 0
    )
    assert batch.input_ids.shape[1] % 4 == 0
    assert batch.num_tokens == 2


@pytest.mark.parametrize(("num_prompts", "num_completions"), [(64, 1), (32, 2), (16, 8)])
def test_ragged_steps_have_few_shapes(num_prompts, num_completions):
    """20 steps of the benchmark's lengths, which without filling have 20 shapes."""
    draw = random.Random(0)

    def length(of: tuple[NormalDist, int, int]) -> int:
        return min(of[2], max(of[1], round(of[0].inv_cdf(draw.random()))))

    limits = {"max_prompt_length": MAX_PROMPT_LENGTH, "max_completion_length": 56}
    limits |= {"micro_batch_tokens": 32768, "micro_batch_size": 1024}
    shapes: dict[bool, set[Any]] = {False: set(), True: set()}
    for _ in range(20):
        lengths = [length(RESPONSE_LENGTHS) for _ in range(num_prompts * num_completions)]
        groups = [
            piece_of(100 * i, length(PROMPT_LENGTHS), lengths[i::num_prompts])
            for i in range(num_prompts)
        ]
        for is_compiled, seen in shapes.items():
            config = tiny.train_config(compile=str(is_compiled).lower(), **limits)
            (packed,) = pack_micro_batches(groups, config)
            batch = collate(packed, config, 0)
            tensors = [*vars(batch).values(), *vars(batch.layout).values()]
            seen.add(tuple(getattr(x, "shape", x) for x in tensors if isinstance(x, int | Tensor)))
    assert len(shapes[False]) == 20
    assert len(shapes[True]) <= 5


def orders(lengths: list[int], batch_size: int, world_size: int, **fields: Any) -> list[BatchOrder]:
    options = {"world_size": world_size} | fields
    return [BatchOrder(lengths, batch_size, rank=r, **options) for r in range(world_size)]


def real_rows(shares: list[list[int | None]]) -> list[int]:
    return sorted(row for share in shares for row in share if row is not None)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    batch_size=st.sampled_from([4, 8, 12]),
)
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(lengths, batch_size):
    plain = BatchOrder([1] * len(lengths), batch_size)
    for step in range(2 * plain.steps_per_epoch):
        expected = real_rows([plain.rows(step)])
        for world_size in (1, 2, 4):
            shares = [order.rows(step) for order in orders(lengths, batch_size, world_size)]
            assert {len(share) for share in shares} == {batch_size // world_size}
            assert real_rows(shares) == expected
            counts = [sum(row is not None for row in share) for share in shares]
            assert max(counts) - min(counts) <= 1  # nobody waits with less than the others


def test_dealing_by_length_by_hand():
    """Two rounds of cards, the second in reverse: 1 8, 2 7, 3 6, 4 5."""
    lengths = [5, 1, 8, 4, 2, 7, 3, 6]
    shares = [order.rows(0) for order in orders(lengths, 8, 4)]
    assert [sorted(lengths[row] for row in share) for share in shares] == [
        [1, 8],
        [2, 7],
        [3, 6],
        [4, 5],
    ]


@given(
    num_rows=st.integers(1, 40), batch_size=st.sampled_from([4, 8]), num_steps=st.integers(0, 30)
)
def test_rows_until_are_those_of_the_first_steps(num_rows, batch_size, num_steps):
    ranks = orders([1 + row % 7 for row in range(num_rows)], batch_size, 2, seed=5)
    seen = {row for step in range(num_steps) for order in ranks for row in order.rows(step)}
    for order in ranks:
        assert order.rows_until(num_steps) == sorted(seen - {None})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=CONFIGS, num_rows=st.integers(1, 14), world_size=st.sampled_from([1, 2, 4]))
def test_every_completion_of_a_step_is_in_one_micro_batch(
    monkeypatch, config, num_rows, world_size
):
    examples = tiny.ragged_examples([(1 + 3 * i % 11, 1 + i % 5, 2) for i in range(num_rows)])
    lengths = [len(e.prompt_ids) + sum(map(len, e.completions)) for e in examples]
    for step in range(2):
        all_batches = in_step(
            monkeypatch,
            [
                lambda rows=rows: micro_batches(examples, rows, config, tiny.vocabulary())
                for rows in [order.rows(step) for order in orders(lengths, 4, world_size)]
            ],
        )
        assert len({len(batches) for batches in all_batches}) == 1
        ids = {}
        for batch in (batch for batches in all_batches for batch in batches):
            for row in batch.is_real.nonzero().flatten().tolist():
                slot = int(batch.slots[row])
                assert slot not in ids
                ids[slot] = batch.completion_ids[row][batch.completion_mask[row]].tolist()
            assert batch.slots[~batch.is_real].tolist() == [0] * int((~batch.is_real).sum())
            assert (batch.is_real[::2] == batch.is_real[1::2]).all()  # a pair stays together
            assert (batch.slots[::2] % 2 == 0).all()
        (one,) = orders(lengths, 4, 1)
        rows = [row for row in one.rows(step) if row is not None]
        assert ids == {2 * row + k: examples[row].completions[k] for row in rows for k in (0, 1)}


@given(config=CONFIGS)
def test_evaluation_scores_every_completion_of_a_prompt_once(config):
    examples = tiny.ragged_examples([(1 + 5 * i % 13, 1 + i % 4, 3, 1) for i in range(9)])
    swapped = [examples[3].completions[k] for k in (2, 0)]
    examples[8] = replace(examples[3], completions=[examples[8].completions[0], *swapped])
    groups, first = distinct_completions(examples, config)
    slots = [slot for group in groups for slot in group.slots]
    for group in groups:
        places = [divmod(slot, 3) for slot in group.slots]
        assert all(group.prompt_ids == examples[row].prompt_ids for row, _ in places)
        assert group.completions == [examples[row].completions[k] for row, k in places]
    assert len(set(slots)) == len(slots)
    assert {first[3 * row + k] for row in range(9) for k in range(3)} == set(slots)
    texts = [(e.prompt_ids, ids) for e in examples for ids in e.completions]
    assert [texts[slot] for slot in first] == texts
    scored = [texts[slot] for slot in slots]
    assert all(scored.count(text) == 1 for text in scored)
    assert len(scored) < 3 * len(examples)
