"""Attention in which the completions of a prompt share the prompt's keys and values.

A row holds prompts with all their completions. A prompt's token attends to the prompt up to itself,
a completion's token to the whole prompt and to its completion up to itself. Each layer makes one
call of fused attention for the prompts and one for the completions; for the second the prompt's
keys and values are copied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.padding import Layout, on_device


def branch_attention(
    query: Tensor,  # (1, H, T, d), or with `is_tail` (1, H, S, d): of the tails only
    key: Tensor,  # (1, H, T, d)
    value: Tensor,  # (1, H, T, d)
    layout: Layout,
    is_tail: bool,
    scaling: float,  # of the scores
) -> Tensor:
    """Attention output of every query, in the shape of `query`.

    Whole trunks are causal and need no mask, so FlashAttention can take them: a token does not
    attend to the padding behind it, and the output at the padding is dropped.
    """
    gathers = Gathers.of(layout, is_tail, query.dtype)
    outputs = []
    keys = Copies.apply(key, *gathers.keys)
    values = Copies.apply(value, *gathers.keys)
    for index, k, v, mask in zip(gathers.queries, keys, values, gathers.masks, strict=True):
        is_causal = mask is None and index.shape[1] == k.shape[2]
        output = nn.functional.scaled_dot_product_attention(
            to_branches(query, index), k, v, mask, is_causal=is_causal, scale=scaling
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # (R * L', H, d)
    output = torch.cat(outputs).index_select(0, gathers.order)
    return output.transpose(0, 1)[None]


def query_columns(layout: Layout, is_tail: bool) -> tuple[list[tuple[int, int, int]], Tensor]:
    """Columns of the queries, in a row of all tokens of a layout or of its tails only.

    Returns:
        Per prompt (start, end of the trunk, end of the branches); (R, L) those of the branches.
    """
    if not is_tail:
        bounds = [(start, trunk_end, end) for start, _, trunk_end, end in layout.trunks]
        return bounds, layout.branch_index
    bounds, num_left_out, before = [], 0, []
    for start, prompt_end, trunk_end, end in layout.trunks:
        num_left_out += prompt_end - 1 - start
        left = num_left_out
        bounds.append((prompt_end - 1 - left, trunk_end - left, end - left))
        before.append(left)
    left_out = on_device(torch.tensor(before), layout.branch_index.device)[layout.branch_owner]
    return bounds, (layout.branch_index - left_out[:, None]).clamp(min=0)


class Gathers(NamedTuple):
    """Columns that `branch_attention` gathers: rectangles, padded on the right.

    The first rectangle has the N trunks: L' queries, L keys. The second has the R branches, if
    there are any: C queries, P + C keys (the prompt's, then the completion's).
    """

    queries: list[Tensor]  # (N, L') and (R, C), the columns among the queries
    keys: list[Tensor]  # (N, L) and (R, P + C), the columns of their keys
    masks: list[Tensor | None]  # (N, 1, L', L) and (R, 1, C, P + C), see `additive`
    order: Tensor  # (queries,), the index of each in the N * L' + R * C outputs

    @classmethod
    def of(cls, layout: Layout, is_tail: bool, dtype: torch.dtype) -> "Gathers":
        """Made once per batch, not in every layer; no size waits for the device."""
        cache = layout.index_cache.gathers
        if (is_tail, dtype) in cache:
            cached: Gathers = cache[is_tail, dtype]
            return cached
        bounds, branch_queries = query_columns(layout, is_tail)
        device = layout.branch_index.device
        q_index, q_mask = ranges([(start, end) for start, end, _ in bounds], device)
        k_index, k_mask = ranges([(start, end) for start, _, end, _ in layout.trunks], device)
        rectangles = [(q_index, k_index)]
        masks: list[Tensor | None] = [None]
        are_alike = len({end - start for start, _, end, _ in layout.trunks}) == 1
        if is_tail and not (are_alike and q_index.shape[1] == 1):
            num_before = (k_mask.sum(-1) - q_mask.sum(-1))[:, None, None]  # keys before the queries
            steps = torch.arange(k_index.shape[1], device=device)  # (L,)
            visible = steps <= steps[: q_index.shape[1], None] + num_before  # (N, L', L)
            masks = [additive(visible, dtype)]
        if layout.branch_index.numel():
            prompt_index, prompt_mask = ranges([(s, p) for s, p, _, _ in layout.trunks], device)
            owner, (num_branches, length) = layout.branch_owner, layout.branch_index.shape
            causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            sees_prompt = prompt_mask[owner][:, None].expand(-1, length, -1)
            sees = torch.cat([sees_prompt, causal.expand(num_branches, -1, -1)], -1)
            key_index = torch.cat([prompt_index[owner], layout.branch_index], 1)
            rectangles.append((branch_queries, key_index))
            masks.append(additive(sees, dtype))

        is_padding = ~torch.cat([q_mask.flatten(), layout.branch_mask.flatten()])
        columns = torch.cat([q_index.flatten(), branch_queries.flatten()])
        num_queries = bounds[-1][2]
        columns = columns.masked_fill(is_padding, num_queries)  # behind the last, and dropped
        outputs = torch.arange(len(columns), device=device)
        order = columns.new_empty(num_queries + 1).scatter(0, columns, outputs)
        query_indices = [query_index for query_index, _ in rectangles]
        key_indices = [key_index for _, key_index in rectangles]
        gathers = cls(query_indices, key_indices, masks, order[:num_queries])
        cache[is_tail, dtype] = gathers
        return gathers


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention mask (R, 1, L', L) added to the scores: 0 where `visible` (R, L', L), else -inf.

    Its rows lie a multiple of 8 numbers apart, as a GPU's kernels require; of any other mask they
    make such a copy in every layer.
    """
    scores = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    scores = nn.functional.pad(scores, (0, -scores.shape[-1] % 8))[..., : scores.shape[-1]]
    return scores.masked_fill_(~visible, float("-inf"))[:, None]


class Copies(torch.autograd.Function):
    """Keys or values (1, H, T, d) gathered at rectangles of columns (R, L): (R, H, L, d) each.

    A token's gradient is summed over its copies in float32, also under bfloat16: a prompt's key has
    a copy in each of its branches.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *rectangles: Tensor) -> tuple[Tensor, ...]:
        """Copy."""
        ctx.rectangles, ctx.length = rectangles, tensor.shape[2]
        return tuple(to_branches(tensor, index) for index in rectangles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of the tensor."""
        _, num_heads, _, width = grads[0].shape
        total = grads[0].new_zeros(ctx.length, num_heads, width, dtype=torch.float32)
        for index, grad in zip(ctx.rectangles, grads, strict=True):
            total.index_add_(0, index.flatten(), grad.transpose(1, 2).flatten(0, 1).float())
        return total.to(grads[0].dtype).transpose(0, 1)[None], *(None for _ in grads)


def to_branches(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather (1, H, T, d) at columns (R, L): (R, H, L, d)."""
    picked: Tensor = tensor[0].index_select(1, index.flatten())  # (H, R * L, d)
    picked = picked.view(len(picked), *index.shape, picked.shape[-1])
    return picked.transpose(0, 1)


def ranges(bounds: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Half-open ranges as index (N, L), padded with their last column, and mask (N, L)."""
    starts, ends = on_device(torch.tensor(bounds), device).split(1, dim=1)  # (N, 1)
    lengths = ends - starts
    columns = torch.arange(max(b - a for a, b in bounds), device=device)  # (L,)
    return starts + columns.minimum(lengths - 1), columns < lengths
