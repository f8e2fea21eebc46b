"""The order of examples (`text/reading.py` makes them), and each rank's micro-batches.

`BatchOrder` has the rows of each rank as a function of the step; `micro_batches` packs them by
length.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from common import distributed
from common.batch import MAKERS, AnyBatch, SharedPrefixBatch
from common.config.stages import CommonConfig, RowsConfig, TrainConfig
from common.noise import permutation
from common.text.example import Example, Vocabulary

MOST_FILLER = 10_000  # largest batch, fillers included, where the data set has fewer rows
order_of_epoch = functools.lru_cache(1)(permutation)


def completion_lengths(examples: Sequence[Example]) -> torch.Tensor:
    """(rows, K) int64, tokens of each completion."""
    return torch.tensor([[*map(len, example.completions)] for example in examples])


@dataclass
class BatchOrder:
    """The rows of a rank at a step: a function of (seed, step), not a state.

    Each epoch is a fresh permutation of all rows. A batch never reaches into the next epoch: the
    last one is filled up with None, so that every rank always has `batch_size / world_size`
    entries. All ranks' entries together do not depend on the number of ranks. Each rank gets long
    and short rows, so that ranks do not wait for each other.
    """

    lengths: Sequence[int]  # of each row, in tokens; at least one row
    batch_size: int  # rows of a step over all ranks, a multiple of `world_size`
    seed: int = 0  # of the permutations
    rank: int = 0
    world_size: int = 1
    num_completion_tokens: int = 0  # in all rows together; prompts have none

    @classmethod
    def of_training(cls, config: RowsConfig, examples: Sequence[Example]) -> "BatchOrder":
        """Order of this process in training.

        A UserError for a batch that ranks cannot share, or that is nearly all filler.
        """
        rank, world_size = distributed.rank(), distributed.world_size()
        distributed.refuse_uneven(config.batch_size, world_size)
        most = max(MOST_FILLER, len(examples))
        if config.batch_size > most:
            raise config.refused("batch_size", f"at most {most}: there are {len(examples)} rows")
        of_completions = [sum(map(len, e.completions)) for e in examples]
        num_tokens = [len(e.prompt_ids) + n for e, n in zip(examples, of_completions, strict=True)]
        total = sum(of_completions)
        return cls(num_tokens, config.batch_size, config.seed, rank, world_size, total)

    def total_steps(self, config: TrainConfig) -> int:
        """Steps of a run: `max_steps`, or those of `num_train_epochs`."""
        return config.max_steps or math.ceil(config.num_train_epochs * self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every row once."""
        return -(-len(self.lengths) // self.batch_size)

    def rows(self, step: int) -> list[int | None]:
        """This rank's rows at a step (counted from 0); None stands for a row of weight 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = order_of_epoch(len(self.lengths), self.seed, epoch)
        rows = order[index * self.batch_size : (index + 1) * self.batch_size]
        batch: list[int | None] = [*sorted(rows, key=lambda row: self.lengths[row])]
        batch += [None] * (self.batch_size - len(batch))
        # Dealt out like cards, every other round in reverse: 0 1 2 2 1 0 0 1 2 ...
        rounds = [batch[i : i + self.world_size] for i in range(0, len(batch), self.world_size)]
        return [cards[:: 1 - 2 * (i % 2)][self.rank] for i, cards in enumerate(rounds)]

    def rows_until(self, num_steps: int) -> list[int]:
        """Rows that any rank sees in the first steps, in ascending order."""
        if num_steps >= self.steps_per_epoch:
            return list(range(len(self.lengths)))
        first = order_of_epoch(len(self.lengths), self.seed, 0)
        return sorted(first[: num_steps * self.batch_size])


@dataclass
class PromptGroup:
    """Completions of one prompt that go through a forward pass together."""

    prompt_ids: list[int]  # never empty
    completions: list[list[int]]  # K lists of ids, with stop token unless truncated
    slots: list[int]  # K indices of the completions in the caller's tensors; empty in a filler
    weight: int = 1  # rows that it counts as in `micro_batch_size`
    row: int = -1  # index of the prompt's row of those read; -1 if unknown


def cut_group(
    prompt_ids: list[int],
    completions: list[list[int]],
    slots: list[int],
    config: CommonConfig,
    row: int = -1,
) -> list[PromptGroup]:
    """Cut a prompt's completions into as few groups of about equal size as the limits allow."""
    for num_groups in range(1, len(slots) + 1):
        size = -(-len(slots) // num_groups)
        shares = [slice(start, start + size) for start in range(0, len(slots), size)]
        groups = [
            PromptGroup(prompt_ids, completions[i], slots[i], len(slots[i]), row) for i in shares
        ]
        if all(fits([group], config) for group in groups):
            break
    return groups


def sizes_of(groups: Sequence[PromptGroup], layout: str) -> Any:
    """Of each group, (n, 4): columns of its prompt and of its completions, rows, weight."""
    is_shared = layout == "shared_prefix"
    columns = sum if is_shared else max
    prompts = [len(group.prompt_ids) for group in groups]
    completions = [columns(map(len, group.completions)) for group in groups]
    rows = [1 if is_shared else len(group.completions) for group in groups]
    return np.array([prompts, completions, rows, [group.weight for group in groups]]).T


def costs(sizes: Any, layout: str) -> Any:
    """Tokens of forward passes over the first group, the first two, and so on, with padding."""
    if layout == "shared_prefix":
        return sizes[:, :2].sum(1).cumsum()
    return np.maximum.accumulate(sizes[:, :2]).sum(1) * sizes[:, 2].cumsum()


def cost(groups: Sequence[PromptGroup], layout: str) -> int:
    """Tokens that a forward pass over these groups computes, padding included."""
    return int(costs(sizes_of(groups, layout), layout)[-1])


def num_fitting(sizes: Any, config: CommonConfig) -> int:
    """The number of first groups that may share a forward pass."""
    fits_budget = costs(sizes, config.layout) <= config.micro_batch_tokens
    return int((fits_budget & (sizes[:, 3].cumsum() <= config.micro_batch_size)).sum())


def fits(groups: Sequence[PromptGroup], config: CommonConfig) -> bool:
    """Whether the groups may share a forward pass."""
    return num_fitting(sizes_of(groups, config.layout), config) == len(groups)


def pack_micro_batches(
    groups: Sequence[PromptGroup], config: CommonConfig, num_completions: int = 1
) -> list[list[PromptGroup]]:
    """Put groups together, the longest first, until a limit is reached. Collective.

    Every rank gets the same number of micro-batches. A rank that needs fewer gets fillers: the
    shortest possible prompt with `num_completions` completions, which count nowhere.
    """
    sizes = sizes_of(groups, config.layout)
    order = (-sizes[:, :2].sum(1) * sizes[:, 2]).argsort(kind="stable")
    packed, left = [], order
    while len(left):
        number = max(1, num_fitting(sizes[left], config))
        packed.append(left[:number])
        left = left[number:]
    number = int(distributed.all_reduce_max(torch.tensor(len(packed))))
    if config.has_fixed_shapes:  # dealt out like cards, so that all are about equally long
        rounds = 2 * number  # every other in reverse
        dealt = [
            np.append(order[i::rounds], order[rounds - 1 - i :: rounds]) for i in range(number)
        ]
        if all(0 < len(batch) == num_fitting(sizes[batch], config) for batch in dealt):
            packed = dealt
    filler = PromptGroup([0], [[0]] * num_completions, [])
    return [[groups[i] for i in batch] for batch in packed] + [[filler]] * (number - len(packed))


def filled(groups: Sequence[PromptGroup], config: CommonConfig) -> list[PromptGroup]:
    """Add groups that count nowhere, with which batches have few shapes.

    Tokens become a multiple of a power of two, a sixteenth to an eighth of the row but at most
    1,024, those of completions of half of it; prompts become a multiple of 4, or of 8 where each
    has one completion, and have on average as many as one of the groups has at most.
    """
    completions = [ids for group in groups for ids in group.completions]
    num_own = sum(map(len, completions))
    num_tokens = num_own + sum(len(group.prompt_ids) for group in groups)
    unit = min(1024, 1 << max(6, num_tokens.bit_length()) - 4)
    most = max(len(group.completions) for group in groups)
    missing = -num_own % (unit // 2)
    step = 8 if most < 2 else 4
    for num_prompts in itertools.count(len(groups) // step * step + step, step):
        num_fillers = num_prompts - len(groups)
        num_rows = most * num_prompts - len(completions)
        in_prompts = num_fillers + -(num_tokens + missing + num_fillers) % unit
        if missing <= num_rows * config.max_completion_length and in_prompts <= num_fillers * max(
            2, config.max_prompt_length
        ):
            break
    rows = [[0] * length for length in even_shares(missing, num_rows)]
    return [*groups] + [
        PromptGroup([0] * length, rows[i::num_fillers], [])
        for i, length in enumerate(even_shares(in_prompts, num_fillers))
    ]


def even_shares(total: int, number: int) -> list[int]:
    """A total as a sum of so many numbers that differ by at most 1."""
    return [total // number + (i < total % number) for i in range(number)]


def collate(groups: Sequence[PromptGroup], config: CommonConfig, pad_id: int) -> AnyBatch:
    """Make one batch of groups, a group's completions next to each other."""
    is_fixed = config.has_fixed_shapes  # with --compile only
    groups = filled(groups, config) if is_fixed else groups
    batch = MAKERS[config.layout](
        [group.prompt_ids for group in groups],
        [group.completions for group in groups],
        pad_id,
        is_real=[bool(group.slots) for group in groups],
        width=config.max_completion_length if is_fixed else 0,
    )
    if is_fixed and isinstance(batch, SharedPrefixBatch):
        width = config.max_completion_length
        most = max(len(group.completions) for group in groups)
        batch.layout.longest = max(batch.layout.longest, config.max_prompt_length + width)
        batch.layout.largest = max(batch.layout.largest, most * width)
    slots = [s for group in groups for s in group.slots or [0] * len(group.completions)]
    rows = [group.row for group in groups for _ in group.completions]
    return replace(batch, slots=torch.tensor(slots), source_rows=rows)


def micro_batches(
    examples: Sequence[Example],
    indices: Sequence[int | None],
    config: CommonConfig,
    vocabulary: Vocabulary,
) -> list[AnyBatch]:
    """This rank's examples of a step, packed by length; as many batches on every rank. Collective.

    The completions of an example stay together; completion k of example n has the slot n * K + k.
    An index that is None counts nowhere.
    """
    num_completions = len(examples[0].completions)
    assert num_completions > 0, "prompts without completions have no loss"
    groups = []
    for n in indices:
        if n is not None:
            example, first = examples[n], n * num_completions
            slots = list(range(first, first + num_completions))
            groups.append(
                PromptGroup(example.prompt_ids, example.completions, slots, row=example.row)
            )
    packed = pack_micro_batches(groups, config, num_completions)
    return [collate(batch, config, vocabulary.pad_id) for batch in packed]


def row_numbers(examples: Sequence[Example]) -> torch.Tensor:
    """(rows,) int64, each example's index before rows were dropped."""
    return torch.tensor([example.row for example in examples])


def prompts(
    examples: Sequence[Example], rows: Sequence[int | None]
) -> tuple[list[Example], torch.Tensor]:
    """This rank's prompts of a step, and a mask (N,) bool, True = a real one.

    A row that is None becomes the first example: every rank makes as many forward passes, and what
    is sampled for it counts nowhere.
    """
    real = torch.tensor([row is not None for row in rows])
    return [examples[row or 0] for row in rows], real
