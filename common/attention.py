"""Attention in which the completions of a prompt share the prompt's keys and values.

transformers lets any decoder call an attention function by name; the one registered here is given
the `Layout` of a batch, or the `DecodingCache` of a sampler, and works where it is given neither as
the usual `sdpa`. Positions (learned or rotary) were applied before, by the model.

A softmax over two sets of keys is the mean of the softmaxes over each, weighted by the sums of
exponentials (Milakov and Gimelshein 2018). So a completion attends to the prompt and to itself
apart, and nobody copies the prompt's keys: all the completions' tokens are queries of one product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.config import UserError
from common.padding import Layout

NAME = "shared_prefix"


def use_shared_prefix(lm: PreTrainedModel) -> None:
    """Let a model take a `layout`; without one it goes on as before.

    Raises:
        UserError: the model brings an attention of its own that cannot be replaced.
    """
    if not getattr(lm, "_supports_attention_backend", False):
        raise UserError(
            f"{type(lm).__name__} has an attention of its own, which cannot share a prompt; use "
            "--layout padded."
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    lm.set_attn_implementation(NAME)


def inputs_for(lm: PreTrainedModel, layout: "Layout | DecodingCache") -> dict[str, Any]:
    """What a decoder's forward is given so that its attention follows the layout.

    A mask with four dimensions is passed on as it is: transformers builds none of its own.
    """
    assert lm.config._attn_implementation == NAME, "use_shared_prefix() comes first"
    return {"layout": layout, "attention_mask": torch.empty(1, 1, 1, 1), "use_cache": False}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: "Layout | DecodingCache | None" = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    Args:
        module: the attention layer.
        query: (B, H, T, d).
        key: (B, H', T, d), H' dividing H.
        value: (B, H', T, d).
        attention_mask: not looked at where there is a layout.
        scaling: of the scores; default 1 / sqrt(d).
        layout: of the tokens, see `inputs_for`.
        options: for `sdpa`.

    Returns:
        (B, T, H, d), and None for the attention weights.
    """
    if layout is None:
        inputs = (module, query, key, value, attention_mask)
        output, _ = sdpa_attention_forward(*inputs, scaling=scaling, **options)
        return output, None
    refuse_unsupported(layout, options)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(layout, DecodingCache):
        output = layout.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore
        return output.transpose(1, 2), None
    num_repeats = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, num_repeats), repeat_kv(value, num_repeats)
    return branch_attention(query, key, value, layout, scaling).transpose(1, 2), None


def refuse_unsupported(layout: "Layout | DecodingCache", options: dict[str, Any]) -> None:
    """Raise a UserError for an attention that sees less than everything, or caps its scores."""
    window = options.get("sliding_window")
    if window is not None and layout.longest > window:
        raise UserError(
            f"the model's attention has a window of {window} tokens and a prompt with its "
            f"completion has {layout.longest}; use --layout padded."
        )
    if options.get("softcap") is not None:
        raise UserError("the model caps its attention scores; use --layout padded.")


def branch_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float
) -> Tensor:
    """Every token attends to what its layout shows it; (1, H, T, d) in and out."""
    if query.device.type == "cpu":
        output: Tensor = FusedBranches.apply(query, key, value, layout, scaling)
        return output
    return gathered_branches(query, key, value, layout, scaling)


class FusedBranches(torch.autograd.Function):
    """Shared-prefix attention from the CPU's fused kernel, which also gives log-sum-exps.

    Its backward kernel recomputes the probabilities from a log-sum-exp. Given the one over *all*
    keys, and the final output, it yields the gradients of its own share of the keys.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float
    ) -> Tensor:
        """Output (1, H, T, d) for inputs of that shape."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        _, num_heads, length, width = query.shape
        output = query.new_empty(1, length, num_heads, width).transpose(1, 2)
        lse = torch.empty(1, length, num_heads, dtype=torch.float32).transpose(1, 2)
        for start, prompt_end, trunk_end, end in layout.trunks:
            prompt, trunk = slice(start, prompt_end), slice(start, trunk_end)
            run, branches = _at(trunk, query, key, value), slice(trunk_end, end)
            output[:, :, trunk], lse[:, :, trunk] = flash(*run, 0.0, True, scale=scaling)
            if end > trunk_end:
                run = [query[:, :, branches], *_at(prompt, key, value)]
                output[:, :, branches], lse[:, :, branches] = flash(*run, 0.0, scale=scaling)
        if len(layout.branch_index):
            own = (_to_branches(x, layout.branch_index) for x in (query, key, value))
            own_output, own_lse = flash(*own, 0.0, True, scale=scaling)  # (R, H, L, d), (R, H, L)
            places = layout.branch_index[layout.branch_mask]  # (S,)
            own_output = own_output.transpose(1, 2)[layout.branch_mask].transpose(0, 1)[None]
            own_lse = own_lse.transpose(1, 2)[layout.branch_mask].transpose(0, 1)[None]
            output[:, :, places], lse[:, :, places] = merge(
                output[:, :, places], lse[:, :, places], own_output, own_lse
            )
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.layout, ctx.scaling = layout, scaling
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of query, key and value."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, output, lse = ctx.saved_tensors
        layout, scaling = ctx.layout, ctx.scaling
        # In the layout in which the projection before the attention stores them.
        grads = [torch.zeros_like(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value)]
        for start, prompt_end, trunk_end, end in layout.trunks:
            prompt, trunk = slice(start, prompt_end), slice(start, trunk_end)
            branches = slice(trunk_end, end)
            run = _at(trunk, grad, query, key, value, output, lse)
            for total, part in zip(grads, flash(*run, 0.0, True, scale=scaling), strict=True):
                total[:, :, trunk] = part
            if end > trunk_end:
                run = [*_at(branches, grad, query), *_at(prompt, key, value)]
                run += _at(branches, output, lse)
                parts = flash(*run, 0.0, False, scale=scaling)
                for total, part, at in zip(grads, parts, (branches, prompt, prompt), strict=True):
                    total[:, :, at] += part
        if len(layout.branch_index):
            index, mask = layout.branch_index, layout.branch_mask
            own = [_to_branches(x, index) for x in (grad, query, key, value, output)]
            own[0] = own[0] * mask[:, None, :, None]  # what fills a branch up has no gradient
            own_lse = _to_branches(lse.unsqueeze(-1), index).squeeze(-1).contiguous()
            parts = flash(*own, own_lse, 0.0, True, scale=scaling)  # (R, H, L, d) each
            for total, part in zip(grads, parts, strict=True):
                total[:, :, index[mask]] += part.transpose(1, 2)[mask].transpose(0, 1)
        return *grads, None, None


def gathered_branches(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float
) -> Tensor:
    """Shared-prefix attention from public functions, with as many calls for one prompt as for many.

    The keys and values of a prompt are copied for each of its branches, within one layer.

    Args:
        query: (1, H, T, d).
        key: (1, H, T, d).
        value: (1, H, T, d).
        layout: of the T tokens.
        scaling: of the scores.

    Returns:
        (1, H, T, d).
    """
    device = query.device
    sdpa = nn.functional.scaled_dot_product_attention
    trunk_index, trunk_mask = _ranges([(start, t) for start, _, t, _ in layout.trunks], device)
    q, k, v = (_to_branches(x, trunk_index) for x in (query, key, value))
    # Filled up on the right, so that the causal mask alone hides what is no token.
    output = sdpa(q, k, v, is_causal=True, scale=scaling).transpose(1, 2)[trunk_mask]  # (S, H, d)
    places = trunk_index[trunk_mask]  # (S,)
    if len(layout.branch_index):
        index, mask = layout.branch_index, layout.branch_mask  # (R, L)
        prompt_index, prompt_mask = _ranges([(s, p) for s, p, _, _ in layout.trunks], device)
        ends = torch.tensor([end for *_, end in layout.trunks], device=device)  # (N,)
        owner = torch.searchsorted(ends, index[:, 0].contiguous(), right=True)  # (R,)
        length = index.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        visible = torch.cat(  # (R, L, P + L)
            [
                prompt_mask[owner][:, None].expand(-1, length, -1),
                causal.expand(len(index), -1, -1),
            ],
            -1,
        )
        both = torch.cat([prompt_index[owner], index], 1)  # (R, P + L)
        q, k, v = (_to_branches(x, i) for x, i in ((query, index), (key, both), (value, both)))
        branches = sdpa(q, k, v, attn_mask=visible[:, None], scale=scaling)  # (R, H, L, d)
        output = torch.cat([output, branches.transpose(1, 2)[mask]])  # (T, H, d)
        places = torch.cat([places, index[mask]])
    return output[places.argsort()].transpose(0, 1)[None]


class DecodingCache:
    """Keys and values of N prompts, once each, and of the samples drawn from them so far.

    The first forward, over the prompts, fills the former; each further one appends a token to every
    sample.

    Attributes:
        length: Tokens of each sample that the samples' keys hold.
        rows: (B',) int64, the samples that are still decoded, out of N * K, prompt-major.
    """

    def __init__(
        self, prompts: Layout, num_samples: int, max_length: int, device: torch.device
    ) -> None:
        """Start with no keys.

        Args:
            prompts: where the N prompts stand in the row that is prefilled.
            num_samples: K, of each prompt.
            max_length: of a sample.
            device: of the model.
        """
        self.prompts = prompts
        self.max_length = max_length
        self.length = 0
        self.longest = prompts.longest + max_length
        self.index, self.mask = _ranges([(s, e) for s, e, _, _ in prompts.trunks], device)  # (N, P)
        self.rows = torch.arange(len(prompts.trunks) * num_samples, device=device)
        self.num_samples = num_samples
        self.prompt_keys: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, (N, H', P, d) each
        self.own_keys: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, (B', H', C, d) each
        self._place_rows()

    def keep(self, kept: Tensor) -> None:
        """Go on with some of the rows, given by their indices into the present ones."""
        self.rows = self.rows[kept]
        for layer, (keys, values) in self.own_keys.items():
            self.own_keys[layer] = keys[kept], values[kept]
        self._place_rows()

    def _place_rows(self) -> None:
        """Give every row a place (n, g) in a rectangle, in which rows of a prompt are neighbours.

        `places` (B',) are flat indices into (N, G), None where the rows fill it in order.
        """
        num_prompts = len(self.index)
        owners = self.rows // self.num_samples  # (B',), ascending
        counts = torch.bincount(owners, minlength=num_prompts)
        self.group = int(counts.max())
        first = counts.cumsum(0) - counts  # (N,)
        places = owners * self.group + torch.arange(len(owners), device=first.device)
        places = places - first[owners]
        self.places = None if len(owners) == num_prompts * self.group else places

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attention output (B, H, T, d) for one layer; stores its keys and values.

        Args:
            layer: counted from 0.
            query: the prompts' (1, H, T, d), then one token of each live sample, (B', H, 1, d).
            key: (1, H', T, d), then (B', H', 1, d).
            value: as key.
            scaling: of the scores.
        """
        num_heads = key.shape[1]
        if layer not in self.prompt_keys:
            self.prompt_keys[layer] = _to_branches(key, self.index), _to_branches(value, self.index)
            shape = (len(self.rows), num_heads, self.max_length, key.shape[-1])
            self.own_keys[layer] = key.new_empty(shape), key.new_empty(shape)
            repeats = query.shape[1] // num_heads
            key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
            return branch_attention(query, key, value, self.prompts, scaling)
        own_keys, own_values = self.own_keys[layer]
        own_keys[:, :, self.length - 1], own_values[:, :, self.length - 1] = (
            key[:, :, 0],
            value[:, :, 0],
        )
        grouped = query.unflatten(1, (num_heads, -1)).squeeze(-2)  # (B', H', H / H', d)
        own = own_keys[:, :, : self.length], own_values[:, :, : self.length]
        output, lse = _with_lse(grouped, *own, scaling)  # (B', H', H / H', d)
        prompt_output, prompt_lse = self._attend_prompts(layer, grouped, scaling)
        merged, _ = merge(output, lse, prompt_output, prompt_lse)
        return merged.reshape(query.shape)

    def _attend_prompts(self, layer: int, grouped: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """All samples of a prompt as queries of its keys: output and log-sum-exp by row."""
        num_prompts, (num_heads, repeats, width) = len(self.index), grouped.shape[1:]
        rectangle = grouped
        if self.places is not None:
            rectangle = grouped.new_zeros(num_prompts * self.group, *grouped.shape[1:])
            rectangle[self.places] = grouped
        shape = (num_prompts, self.group, num_heads, repeats)
        queries = rectangle.reshape(*shape, width).transpose(1, 2).flatten(2, 3)  # (N, H', G r, d)
        bias = None
        if num_prompts > 1:
            bias = torch.zeros_like(self.mask, dtype=grouped.dtype)
            bias = bias.masked_fill(~self.mask, float("-inf"))[:, None, None]  # (N, 1, 1, P)
        output, lse = _with_lse(queries, *self.prompt_keys[layer], scaling, bias)
        output = output.unflatten(2, (self.group, repeats)).transpose(1, 2).flatten(0, 1)
        lse = lse.unflatten(2, (self.group, repeats)).transpose(1, 2).flatten(0, 1)
        if self.places is not None:
            output, lse = output[self.places], lse[self.places]
        return output, lse


def merge(
    output: Tensor, lse: Tensor, other_output: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each.

    Args:
        output: (..., d).
        lse: (...) float32, log of the sum of exponentiated scores.
        other_output: (..., d).
        other_lse: (...) float32.

    Returns:
        Output and log-sum-exp over both sets.
    """
    total = torch.logaddexp(lse, other_lse)
    share = (lse - total).exp().unsqueeze(-1)
    merged = output * share + other_output * (other_lse - total).exp().unsqueeze(-1)
    return merged.to(output.dtype), total


def _with_lse(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention without a causal mask, (B, H, T, d), and its log-sum-exp (B, H, T)."""
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = flash(query, key, value, attn_mask=bias, scale=scaling)
        return output, lse
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    scores = scores if bias is None else scores + bias
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(value.dtype) @ value, lse


def _at(places: slice, *tensors: Tensor) -> list[Tensor]:
    """The tokens of a range, of tensors (1, H, T, ...)."""
    return [tensor[:, :, places] for tensor in tensors]


def _to_branches(tensor: Tensor, index: Tensor) -> Tensor:
    """(1, H, T, d) at places (R, L), as (R, H, L, d)."""
    picked: Tensor = tensor[0].index_select(1, index.flatten())  # (H, R * L, d)
    picked = picked.view(len(picked), *index.shape, -1)
    return picked.transpose(0, 1)


def _ranges(ranges: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Half-open ranges as index (N, L) filled up with the last place, and mask (N, L)."""
    bounds = torch.tensor(ranges, device=device)  # (N, 2)
    starts, lengths = bounds[:, :1], bounds[:, 1:] - bounds[:, :1]
    places = torch.arange(int(max(b - a for a, b in ranges)), device=device)  # (L,)
    return starts + places.minimum(lengths - 1), places < lengths
