"""How many floating-point operations a step needs at least: the floor that speeds are held against.

The prompt is computed once for all its completions, the vocabulary head on completion tokens only,
attention looks back only, and of a prompt's tokens but the last the last block computes keys and
values alone, since nobody reads more. The backward pass costs twice the forward pass. The formulas
of a forward pass are in `experiments/plan/work.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.evidence.bench.rows import BenchRow, Shape
from experiments.plan import work
from experiments.plan.footprint import Decoder

FORWARD, TRAIN = 1, 3  # passes: forward alone; forward and backward


def decoder(shape: Shape) -> Decoder:
    """A GPT-2: 12 width^2 weights in a block (4 attention, of which 2 keys and values; 8 MLP)."""
    width = shape.width
    return Decoder(shape.num_layers, 12 * width**2, 2 * width**2, width, width * shape.vocabulary)


def group_flops(shape: Shape, prompt: float, completions: Sequence[float], *, head: bool) -> float:
    """One forward pass of a prompt and its completions; see `experiments.plan.work.group_flops`."""
    model = decoder(shape)
    return work.group_flops(model if head else replace(model, head_weights=0), prompt, completions)


def step_flops(
    row: BenchRow,
    shape: Shape,
    lengths: dict[str, Sequence[int]],
    completion_length: float = 0.0,
) -> float:
    """The floor of one optimiser step.

    SFT and reward model: forward and backward. DPO: the same, and a forward of the reference unless
    it was computed ahead. GRPO: a forward to sample (a token's keys and values are kept, so each
    token passes once), a forward of the reference, forward and backward, and a forward of the
    reward model where there is one; the sampler's log-probabilities serve as the old ones.

    Args:
        row: What is trained.
        shape: The model (reward model, reference and policy have one shape).
        lengths: Tokens by column of the row's texts, as `fixture.json` has them.
        completion_length: GRPO: mean tokens of the sampled completions.
    """
    columns = [lengths[column] for column in sorted(lengths) if column != "prompt"]
    if row.stage == "grpo":
        columns = [[completion_length] * row.num_rows] * row.num_generations
    completions = list(zip(*columns, strict=True))  # by row of text
    total = 0.0
    for prompt, group in zip(lengths["prompt"], completions, strict=True):
        passes = TRAIN + 2 * FORWARD if row.stage == "grpo" else TRAIN
        total += passes * group_flops(shape, prompt, group, head=row.stage != "reward")
        if row.with_reward_model:
            total += FORWARD * group_flops(shape, prompt, group, head=False)
    return total


def step_units(row: BenchRow, lengths: dict[str, Sequence[int]]) -> int:
    """Units of a row in a step: tokens of prompts and completions, pairs, or rollouts."""
    if row.stage == "sft":
        return sum(sum(column) for column in lengths.values())
    return row.num_rows * max(1, row.num_generations)
