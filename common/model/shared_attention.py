"""Attention in which the completions of a prompt share the prompt's keys and values.

Two calls of fused attention over ranges of a row (see `padding.Layout`) need neither a mask nor a
copy. In the first every segment attends to itself, causally. In the second the branches attend to
their prompts. A query's two outputs are merged, weighted by the sums of their exponential scores.

In backward both calls are given the merged output and log-sum: with these each computes its share
of the gradient, exactly (as ring attention does over ranks, Liu et al. 2023, arXiv 2310.01889).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.batch import Layout

aten = torch.ops.aten
KINDS = {False: 0, True: 2}  # of the efficient kernel's mask: causal is 2, to end at the last key


def branch_attention(
    query: Tensor,  # (1, H, T, d), or with `is_tail` (1, H, S, d): of the tails only
    key: Tensor,  # (1, H', T, d), H' dividing H
    value: Tensor,  # (1, H', T, d)
    layout: Layout,
    is_tail: bool,
    scaling: float,  # of the scores
) -> Tensor:
    """Attention output of every query, in the shape of `query`."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output: Tensor = TwoCalls.apply(query, key, value, layout, is_tail, scaling)
    return output.transpose(0, 1)[None]


class TwoCalls(torch.autograd.Function):
    """Both calls and their merge: queries (Q, H, d), keys and values (T, H', d)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        is_tail: bool,
        scaling: float,
    ) -> Tensor:
        """Output (Q, H, d)."""
        own_ends = [layout.tail_ends if is_tail else layout.segment_ends, layout.segment_ends]
        longest = [layout.longest] * 2
        output, log_sum = range_attention(
            [query, key, value], own_ends, longest, is_causal=True, scaling=scaling
        )
        if layout.num_branch:
            branch = slice(len(query) - layout.num_branch, None)
            shared = slice(len(key) - layout.num_branch)
            other_output, other_log_sum = range_attention(
                [query[branch], key[shared], value[shared]],
                [layout.group_ends, layout.prompt_ends],
                [layout.largest, layout.longest],
                is_causal=False,
                scaling=scaling,
            )
            merged = torch.logaddexp(log_sum[:, branch], other_log_sum)  # (H, Q')
            share = (log_sum[:, branch] - merged).exp().t().unsqueeze(-1)  # (Q', H, 1)
            output[branch] = torch.lerp(other_output.to(share), output[branch].to(share), share)
            log_sum[:, branch] = merged
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.layout, ctx.own_ends, ctx.scaling = layout, own_ends, scaling
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of query, key and value."""
        query, key, value, output, log_sum = ctx.saved_tensors
        layout, scaling, grad = ctx.layout, ctx.scaling, grad.contiguous()
        grads = range_attention_backward(
            [grad, query, key, value, output, log_sum],
            ctx.own_ends,
            [layout.longest] * 2,
            is_causal=True,
            scaling=scaling,
        )
        if layout.num_branch:
            branch = slice(len(query) - layout.num_branch, None)
            shared = slice(len(key) - layout.num_branch)
            tensors = [grad[branch], query[branch], key[shared], value[shared], output[branch]]
            others = range_attention_backward(
                [*tensors, log_sum[:, branch].contiguous()],
                [layout.group_ends, layout.prompt_ends],
                [layout.largest, layout.longest],
                is_causal=False,
                scaling=scaling,
            )
            totals = grads[0][branch], grads[1][shared], grads[2][shared]
            torch._foreach_add_(totals, others)
        return *grads, None, None, None


@torch.library.custom_op("summarize_from_feedback::range_attention", mutates_args=())
def range_attention(
    tensors: Sequence[Tensor],
    ends: Sequence[Tensor],
    longest: Sequence[int],
    *,
    is_causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attention of each range of queries to the keys of the same range, by a fused kernel.

    The `tensors` are queries (Q, H, d), keys and values (T, H', d); the `ends` (S + 1,) of queries
    and of keys as in `Layout`, and the `longest` range of each. The last query of a range sees its
    last key; with `is_causal` the one before it sees one key less. Every query is in a range, and a
    range with queries has keys. Returns the output (Q, H, d), and the log-sum of the exponential
    scores (H, Q), float32.
    """
    (query, key, value), (query_ends, key_ends) = tensors, ends
    most_queries, most_keys = longest
    attend: Callable[..., Any]
    if is_for_flash(query):
        attend = partial(aten._flash_attention_forward, query, key, value, query_ends, key_ends)
        output, log_sum, *_ = attend(most_queries, most_keys, 0.0, is_causal, False, scale=scaling)
        return output.contiguous(), log_sum  # by default strided as the queries
    key, value = (repeated(x, query.shape[1]) for x in (key, value))
    if not is_on_cpu(query):
        attend = partial(
            aten._efficient_attention_forward, query[None], key[None], value[None], None
        )
        attend = partial(attend, query_ends, key_ends, most_queries, most_keys, scale=scaling)
        output, padded_sum, *_ = attend(0.0, KINDS[is_causal], True)
        index, place = ranges_of_queries(query_ends, len(query))
        return output[0], padded_sum[index, :, place].t().contiguous()
    output, log_sum = empty_output(tensors)
    query, key, value, result = (heads_first(x) for x in (query, key, value, output))
    for q, k in ranges(query_ends, key_ends):
        options = options_of(q, k, is_causal, query.dtype) | {"scale": scaling}
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        result[:, :, q], log_sum[None, :, q] = attend(
            query[:, :, q], key[:, :, k], value[:, :, k], **options
        )
    return output, log_sum


@range_attention.register_fake
def empty_output(tensors: Sequence[Tensor], *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Tensors of the shapes that `range_attention` returns."""
    query = tensors[0]
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[1::-1], dtype=dtype)


@torch.library.custom_op("summarize_from_feedback::range_attention_backward", mutates_args=())
def range_attention_backward(
    tensors: Sequence[Tensor],
    ends: Sequence[Tensor],
    longest: Sequence[int],
    *,
    is_causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; see `range_attention`.

    The `tensors` are the output's gradient, query, key, value, output and log-sum. Output and
    log-sum may be over more keys than these, whose share of the gradient this is.
    """
    grad, query, key, value, output, log_sum = tensors
    (query_ends, key_ends), (most_queries, most_keys) = ends, longest
    attend: Callable[..., Any]
    if is_for_flash(query):
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        attend = partial(aten._flash_attention_backward, grad, query, key, value, output, log_sum)
        attend = partial(attend, query_ends, key_ends, most_queries, most_keys, 0.0, is_causal)
        grads = attend(seed, unused, scale=scaling)
        return tuple(x.contiguous() for x in grads)  # type: ignore[return-value]
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    key, value = (repeated(x, num_heads) for x in (key, value))
    if not is_on_cpu(query):
        index, place = ranges_of_queries(query_ends, len(query))
        shape = len(query_ends) - 1, num_heads, -(-most_queries // 32) * 32
        padded_sum = log_sum.new_full(shape, math.inf)
        padded_sum[index, :, place] = log_sum.t()
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        attend = partial(aten._efficient_attention_backward, grad[None], query[None], key[None])
        attend = partial(attend, value[None], None, output[None], query_ends, key_ends)
        attend = partial(attend, most_queries, most_keys, padded_sum, 0.0, seed, seed)
        grads = [x[0].contiguous() for x in attend(KINDS[is_causal], False, scale=scaling)[:3]]
    else:
        grads = [x.new_zeros(x.shape) for x in (query, key, value)]  # also of keys without a query
        totals = [heads_first(x) for x in grads]
        grad, query, key, value, output = map(heads_first, (grad, query, key, value, output))
        for q, k in ranges(query_ends, key_ends):
            options = options_of(q, k, is_causal, query.dtype) | {"scale": scaling}
            attend = partial(
                aten._scaled_dot_product_flash_attention_for_cpu_backward,
                grad[:, :, q],
                query[:, :, q],
                key[:, :, k],
                value[:, :, k],
            )
            of_range = attend(output[:, :, q], log_sum[None, :, q], 0.0, **options)
            for total, columns, values in zip(totals, (q, k, k), of_range, strict=True):
                total[:, :, columns] = values
    return grads[0], *(summed(x, num_key_heads) for x in grads[1:])


@range_attention_backward.register_fake
def empty_grads(tensors: Sequence[Tensor], *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Tensors of the shapes that `range_attention_backward` returns."""
    return tuple(x.new_empty(x.shape) for x in tensors[1:4])


def is_for_flash(query: Tensor) -> bool:
    """Whether FlashAttention takes the queries (Q, H, d)."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return not is_on_cpu(query) and is_half and query.shape[-1] in range(8, 257, 8)


def is_on_cpu(query: Tensor) -> bool:
    """Whether the CPU's kernel is to be used."""
    return query.device.type == "cpu"


def ranges(query_ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
    """The columns of each range that has queries, and those of its keys."""
    columns = [
        [slice(start, end) for start, end in itertools.pairwise(ends.tolist())]
        for ends in (query_ends, key_ends)
    ]
    return [(q, k) for q, k in zip(columns[0], columns[1], strict=True) if q.start < q.stop]


def ranges_of_queries(ends: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
    """The range of each query, and its number in it: (Q,) each."""
    queries = torch.arange(num_queries, device=ends.device)
    index = torch.searchsorted(ends, queries, right=True) - 1
    return index, queries - ends[index]


def options_of(queries: slice, keys: slice, is_causal: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Whether and with which mask the CPU's kernel lets the last query see the last key."""
    num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
    if not is_causal or num_queries == num_keys:
        return {"is_causal": is_causal}
    hidden = torch.full((num_queries, num_keys), -math.inf, dtype=dtype)
    return {"is_causal": False, "attn_mask": hidden.triu(1 + num_keys - num_queries)}


def heads_first(tensor: Tensor) -> Tensor:
    """(L, H, d) as (1, H, L, d)."""
    return tensor.transpose(0, 1)[None]


def repeated(tensor: Tensor, num_heads: int) -> Tensor:
    """Keys or values (T, H', d) for each head of the queries: (T, H, d)."""
    num_repeats = num_heads // tensor.shape[1]
    return tensor if num_repeats == 1 else tensor.repeat_interleave(num_repeats, 1)


def summed(grad: Tensor, num_heads: int) -> Tensor:
    """The gradient of what was `repeated`, summed in float32 or better."""
    if grad.shape[1] == num_heads:
        return grad
    groups: Tensor = grad.unflatten(1, (num_heads, -1))  # (T, H', r, d)
    return groups.sum(2, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype)
