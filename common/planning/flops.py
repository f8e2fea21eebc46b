"""How many floating-point operations a forward pass needs, from the sizes of a decoder.

A product of (m, k) and (k, n) costs 2 m k n. Norms, softmax, activations, embeddings and the
optimiser are left out (under 2 % at the sizes of GPT-2).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Decoder:
    """What a forward pass costs follows from these."""

    num_layers: int
    block_weights: int  # numbers in the matrices of one block
    key_value_weights: int  # of these, in what makes keys and values
    attention_width: int  # heads times the width of one
    head_weights: int  # numbers in the projection onto the vocabulary


def block_flops(decoder: Decoder, num_tokens: float) -> float:
    """Linear layers of all blocks: each weight is multiplied and added once per token."""
    return 2.0 * decoder.num_layers * decoder.block_weights * num_tokens


def attention_flops(decoder: Decoder, num_pairs: float) -> float:
    """Scores and weighted values: 2 products of 2 width each per (query, key) pair and layer."""
    return 4.0 * decoder.num_layers * decoder.attention_width * num_pairs


def head_flops(decoder: Decoder, num_tokens: float) -> float:
    """The vocabulary head on so many positions."""
    return 2.0 * decoder.head_weights * num_tokens


def causal_pairs(num_queries: float, num_before: float = 0) -> float:
    """(query, key) pairs of a run of tokens.

    Each sees itself, those before it in the run, and `num_before` tokens before the run.
    """
    return num_queries * num_before + num_queries * (num_queries + 1) / 2


def group_flops(
    decoder: Decoder, prompt: float, completions: Sequence[float], *, head: bool
) -> float:
    """One forward pass of a prompt, computed once, and its completions.

    Args:
        decoder: The model.
        prompt: Tokens of the prompt.
        completions: Tokens of each completion.
        head: Whether completion tokens go through the vocabulary head (a policy's do).
    """
    pairs = causal_pairs(prompt) + sum(causal_pairs(length, prompt) for length in completions)
    total = block_flops(decoder, prompt + sum(completions)) + attention_flops(decoder, pairs)
    return total - unread_flops(decoder, prompt - 1) + head * head_flops(decoder, sum(completions))


def unread_flops(decoder: Decoder, num_tokens: float) -> float:
    """What the last block need not do for a prompt's tokens: all but their keys and values."""
    rest = decoder.block_weights - decoder.key_value_weights
    pairs = causal_pairs(num_tokens)
    return 2.0 * rest * num_tokens + 4.0 * decoder.attention_width * pairs


def copied_flops(
    decoder: Decoder, prompt: float, completions: Sequence[float], *, head: bool
) -> float:
    """As `group_flops`, of every completion with a copy of its prompt, without padding."""
    return sum(
        block_flops(decoder, prompt + length)
        + attention_flops(decoder, causal_pairs(prompt + length))
        + head * head_flops(decoder, length + 1)
        for length in completions
    )
