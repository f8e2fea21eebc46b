"""How many floating-point operations a step needs at least: the floor that speeds are held against.

The prompt is computed once for all its completions, the vocabulary head on completion tokens only,
attention looks back only, and of a prompt's tokens but the last the last block computes keys and
values alone, since nobody reads more. The backward pass costs twice the forward pass. The formulas
of a forward pass are in `common/record/flops.py`.
"""

from collections.abc import Sequence

from common.record.flops import Decoder, group_flops
from experiments.evidence.bench.rows import BenchRow, Shape

FORWARD, TRAIN = 1, 3  # passes: forward alone; forward and backward


def decoder(shape: Shape, *, has_head: bool = True) -> Decoder:
    """A GPT-2: 12 width^2 weights in a block (4 attention, of which 2 keys and values; 8 MLP)."""
    width, head_weights = shape.width, shape.width * shape.vocabulary * has_head
    return Decoder(shape.num_layers, 12 * width**2, 2 * width**2, width, head_weights)


def step_flops(
    row: BenchRow, shape: Shape, lengths: dict[str, Sequence[int]], completion_length: float = 0.0
) -> float:
    """The floor of one optimiser step.

    Forward and backward; the reference of DPO was computed ahead. GRPO: also a forward to sample (a
    token's keys and values are kept, so each token passes once) and one of the reference; the
    sampler's log-probabilities serve as the old ones.

    Args:
        row: What is trained.
        shape: The model (reward model, reference and policy have one shape).
        lengths: Tokens by column of the row's texts, as `fixture.json` has them.
        completion_length: GRPO: mean tokens of the sampled completions.
    """
    columns = [lengths[column] for column in sorted(lengths) if column != "prompt"]
    if row.stage == "grpo":
        columns = [[completion_length] * row.num_rows] * row.num_generations
    passes = TRAIN + 2 * FORWARD if row.stage == "grpo" else TRAIN
    model = decoder(shape, has_head=row.stage != "reward")
    completions = zip(*columns, strict=True)  # by row of text
    groups = zip(lengths["prompt"], completions, strict=True)
    return passes * sum(group_flops(model, prompt, group) for prompt, group in groups)


def step_units(row: BenchRow, lengths: dict[str, Sequence[int]]) -> int:
    """Units of a row in a step: tokens of prompts and completions, pairs, or rollouts."""
    if row.stage == "sft":
        return sum(sum(column) for column in lengths.values())
    return row.num_rows * max(1, row.num_generations)
