"""How many floating-point operations a step needs at least: the floor that speeds are held against.

The prompt is computed once for all its completions, the vocabulary head on completion tokens only,
attention looks back only, and of a prompt's tokens but the last the last block computes keys and
values alone, since nobody reads more. A product of (m, k) and (k, n) costs 2 m k n; the backward
pass costs twice the forward pass. LayerNorm, softmax, GELU, the embeddings and the optimiser are
left out (under 2 % at these sizes).
"""

from collections.abc import Sequence

from tests.benchmarks.fixture import Shape
from tests.benchmarks.rows import BenchRow

FORWARD, TRAIN = 1, 3  # passes: forward alone; forward and backward


def block_flops(shape: Shape, num_tokens: int) -> float:
    """Linear layers of all blocks: 12 width^2 weights each (4 attention, 8 MLP), 2 per token."""
    return 24.0 * shape.num_layers * shape.width**2 * num_tokens


def attention_flops(shape: Shape, num_pairs: float) -> float:
    """Scores and weighted values: 2 products of 2 width each per (query, key) pair and layer."""
    return 4.0 * shape.num_layers * shape.width * num_pairs


def causal_pairs(num_queries: float, num_before: float = 0) -> float:
    """(query, key) pairs of a run of tokens.

    Each sees itself, those before it in the run, and `num_before` tokens before the run.
    """
    return num_queries * num_before + num_queries * (num_queries + 1) / 2


def head_flops(shape: Shape, num_tokens: float) -> float:
    """The vocabulary head on so many positions."""
    return 2.0 * shape.width * shape.vocabulary * num_tokens


def group_flops(shape: Shape, prompt: float, completions: Sequence[float], *, head: bool) -> float:
    """One forward pass of a prompt and its completions.

    Args:
        shape: The model.
        prompt: Tokens of the prompt.
        completions: Tokens of each completion.
        head: Whether completion tokens go through the vocabulary head (a policy's do).
    """
    pairs = causal_pairs(prompt) + sum(causal_pairs(length, prompt) for length in completions)
    total = block_flops(shape, prompt + sum(completions)) + attention_flops(shape, pairs)
    return total - unread_flops(shape, prompt - 1) + head * head_flops(shape, sum(completions))


def unread_flops(shape: Shape, num_tokens: float) -> float:
    """What the last block need not do for a prompt's tokens: 10 of its 12 width^2, attention."""
    pairs = causal_pairs(num_tokens)
    return 20.0 * shape.width**2 * num_tokens + 4.0 * shape.width * pairs


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
        with_head = group_flops(shape, prompt, group, head=row.stage != "reward")
        passes = TRAIN
        if row.stage == "dpo":
            passes += FORWARD * (not row.precompute_reference)
        if row.stage == "grpo":
            passes += 2 * FORWARD
        total += passes * with_head
        if row.with_reward_model:
            total += FORWARD * group_flops(shape, prompt, group, head=False)
    return total


def step_units(row: BenchRow, lengths: dict[str, Sequence[int]]) -> int:
    """What a step makes of the row's unit: tokens of prompts and completions, pairs, rollouts."""
    if row.stage == "sft":
        return sum(sum(column) for column in lengths.values())
    return row.num_rows * max(1, row.num_generations)
