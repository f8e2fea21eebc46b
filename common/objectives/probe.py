"""Tiny batches that objectives are checked on, and whether a row depends on itself alone.

A batch has 7 rows, in the first dimension of its tensors. Rows 1, 3 and 5 are observed; further
batches have them again, and others before them, between and behind: in the second with larger and
smaller values, other signs, other lengths and counts; in the last two all above the observed rows,
and all below them, so that these are the first and the last in any order.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Batch = dict[str, Tensor]
OBSERVED = slice(1, None, 2)
OTHERS = slice(0, None, 2)
ALONE = slice(5, 6)
HALF, REST = slice(0, 4), slice(4, None)
# A row alone goes through other code of a kernel than one among others: each rounds to some units
# of float32, 2^-24, which a handful of operations adds up, and a difference of numbers enlarges.
ROUNDING = 2.0**-16
MOST_SUMS = 8  # over the ranks, in a call


def tokens() -> list[Batch]:
    """Batches of tokens, (7, 4): ratios on both sides of 1, log-probs below 0.

    Row 1 has ratios of 1 and advantage 1. Row 6 of the first has no token, as rows that only keep
    ranks in step. The others have other values where the mask is False, too.
    """
    batches = []
    for seed, scales, lengths, advantages in (
        (0, [1.0] * 7, [3, 4, 1, 2, 4, 3, 0], [0.7, 1.0, -2.0, -0.5, 1.5, 0.8, -1.0]),
        (9, [0.2, 1, 2, 1, 3, 1, 0.3], [2, 4, 4, 2, 2, 3, 4], [-1.5, 1, 4, -0.5, 3, 0.8, 2]),
    ):
        logps = uniform(-4.0, -1.4, 4, seed)
        old_logps = logps + uniform(-1.0, 1.0, 4, seed + 1)
        sampled_logps = old_logps + uniform(-0.3, 0.3, 4, seed + 2)
        old_logps[1] = sampled_logps[1] = logps[1]
        batch = {"logps": logps, "old_logps": old_logps, "sampled_logps": sampled_logps}
        batch = {name: torch.tensor(scales)[:, None] * batch[name] for name in batch}
        batch["advantages"] = torch.tensor(advantages)[:, None].repeat(1, 4)
        batches.append(batch | {"mask": torch.arange(4) < torch.tensor(lengths)[:, None]})
    for scale, ratio, advantage, length in ((0.01, 4.0, 20.0, 4), (8.0, -4.0, -20.0, 1)):
        logps = scale * batches[0]["logps"]
        batch = {"logps": logps, "old_logps": logps - ratio, "sampled_logps": logps - ratio}
        batch["advantages"] = torch.full_like(logps, advantage)
        batches.append(batch | {"mask": (torch.arange(4) < length).repeat(7, 1)})
    first, *others = batches
    return [first, *(moved_outside(among_others(first, batch)) for batch in others)]


def moved_outside(batch: Batch) -> Batch:
    """A batch of tokens with other values where the mask is False."""
    mask = batch["mask"]
    return {n: v if n == "mask" else v.where(mask, v - 0.4) for n, v in batch.items()}


def pairs() -> list[Batch]:
    """Batches of pairs, (7, 2), whose log-probs are sums, with margins of both signs.

    In row 1 policy and reference are equal, as before the first step; in row 3 the policy prefers
    the rejected completion.
    """
    batches = []
    for seed, least, chosen, rejected, lengths in (  # log pi / ref of each
        (
            *(0, -25.0, [2.0, 0, -4, -1, 1, 3, 0.5], [-3.0, 0, 1, 1, 2, -1, 0.2]),
            [[5, 3], [2, 3], [1, 8], [4, 2], [4, 4], [6, 2], [7, 6]],
        ),
        (
            *(1, -50.0, [1.0, 0, 4, -1, 3, 3, -4], [-2.0, 0, -2, 1, 1, -1, 2]),
            [[9, 2], [2, 3], [3, 12], [4, 2], [3, 5], [6, 2], [2, 2]],
        ),
    ):
        ref_logps = uniform(least, -6.0, 2, seed)
        ref_logps[0], ref_logps[1], ref_logps[3] = -5.0 - 10 * (1 - seed), -12.0, -12.0
        logps = ref_logps + torch.tensor([chosen, rejected]).T
        batch = {"logps": logps, "ref_logps": ref_logps, "lengths": torch.tensor(lengths)}
        batches.append(batch)
    for logps_of_row, length in (([-1.0, -60.0], 40), ([-60.0, -1.0], 1)):
        extreme = {
            "logps": torch.tensor([logps_of_row] * 7),
            "ref_logps": torch.full((7, 2), -30.0),
        }
        batches.append(extreme | {"lengths": torch.full((7, 2), length)})
    first, *others = batches
    return [first, *(among_others(first, batch) for batch in others)]


def groups(num_generations: int, num_functions: int, least: float) -> list[Batch]:
    """Batches of rewards (7, F, G), at least that, the same by every function.

    In group 1 they rise, in group 3 they are equal. Of two batches some groups do not count.
    """
    first = uniform(-2.0, 1.0, num_generations, seed=0)
    first[1], first[3] = torch.arange(num_generations) ** 2.0, 1.0
    first = first if least == -torch.inf else least + first.abs()
    scales = torch.tensor([5.0, 1, -0.3, 1, -40, 1, 0])
    batches = []
    for rewards, is_counted in (
        (first, scales < 10),
        (scales[:, None] * first - 0.5, scales > 0),
        (first + 100, scales < 10),
        (first - 100, scales < 10),
    ):
        rewards = rewards.clamp(min=least)
        rewards = rewards[:, None].repeat(1, num_functions, 1)
        batches.append({"rewards": rewards, "counted": is_counted})
    observed, *others = batches
    return [observed, *(among_others(observed, batch) for batch in others)]


def uniform(low: float, high: float, num_columns: int, seed: int) -> Tensor:
    """Numbers (7, columns) between the bounds, the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(7, num_columns, generator=generator)


def among_others(batch: Batch, others: Batch) -> Batch:
    """The observed rows of the one batch, and all other rows of the other."""
    mixed = {name: values.clone() for name, values in others.items()}
    for name, values in batch.items():
        mixed[name][OBSERVED] = values[OBSERVED]
    return mixed


def row_of(batch: Batch) -> Batch:
    """Row 5 alone, of tokens without padding; its tensors share memory with the batch's."""
    row = {name: values[ALONE] for name, values in batch.items()}
    return {
        name: values[:, : row["mask"].sum()] if "mask" in row else values
        for name, values in row.items()
    }


# ---- what a row depends on -----------------------------------------------------------------------


def with_slopes(loss: Tensor, logps: Tensor) -> Batch:
    """Losses, and if they have a gradient that of all, and of the observed rows' alone."""
    if not loss.requires_grad:
        return {"loss": loss}
    slopes = [
        torch.autograd.grad(losses.sum(), logps, retain_graph=True, materialize_grads=True)[0]
        for losses in (loss, loss[OBSERVED])
    ]
    return {"loss": loss.detach(), "slope": slopes[0], "slope of observed": slopes[1]}


def is_by_row(seen: Batch, among: Batch, of_row: Batch) -> bool:
    """Whether values of observed rows are the same among others, and those of row 5 alone."""
    slopes = [each["slope of observed"] for each in (seen, among) if "slope" in each]
    if any(slope[OTHERS].nan_to_num(0.0).any() for slope in slopes):  # 0 times infinity is NaN
        return False
    names = [name for name in seen if name in among]
    pairs = [(seen[name][OBSERVED], among[name][OBSERVED]) for name in names]
    for name in [name for name in of_row if name in seen]:
        width = of_row[name].shape[-1]
        pairs.append((of_row[name], seen[name][ALONE][..., :width]))
    return all(is_same(*pair) for pair in pairs)


def is_same(values: Tensor, others: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    values, others = values.detach().double(), others.detach().double()
    smallest = (
        ROUNDING * min(1.0, float(values.nan_to_num().abs().max())) if values.numel() else 0.0
    )
    return torch.allclose(values, others, rtol=ROUNDING, atol=smallest, equal_nan=True)


def unless_random(reason: str, seen: Batch, again: Batch) -> str:
    """The reason, or that a second call on the same batch gave other values."""
    is_random = not all(is_same(values, again[name]) for name, values in seen.items())
    return (
        "returns other values for the same inputs when it is called again" if is_random else reason
    )


def on_two_ranks(
    function: Callable[[Batch, Callable[[Tensor], Tensor]], Tensor], batch: Batch
) -> Tensor:
    """The joined results of a function that is called on the halves of a batch.

    Its second argument sums over both ranks. They are called in turn, again and again: with each
    round one sum more is that of both, as what one rank adds follows from the sums before.
    """
    halves = [{name: values[rows] for name, values in batch.items()} for rows in (HALF, REST)]
    results: list[Tensor] = []
    before: list[list[Tensor]] = [[], []]  # what each rank added to the sums, a round ago
    for _ in range(MOST_SUMS + 1):
        added: list[list[Tensor]] = [[], []]

        def all_reduce(values: Tensor, mine: list[Tensor], others: list[Tensor]) -> Tensor:
            mine.append(values.clone())
            return values + others[len(mine) - 1] if len(mine) <= len(others) else values

        results = [
            function(half, partial(all_reduce, mine=added[rank], others=before[1 - rank]))
            for rank, half in enumerate(halves)
        ]
        before = added
    return torch.cat(results)
