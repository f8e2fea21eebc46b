"""From hidden states to log-probabilities without keeping the logits.

Only the tokens of completions are projected onto the vocabulary (35 of 305, with a prompt of 270).
A loss needs a few numbers per token and not the logits. So small batches keep their logits for
backward, and larger ones recompute them, a chunk of rows at a time: memory does not grow with rows
times vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Most logits in memory at once: 64 MiB of float32, on a GPU 1 GiB. Fewer are kept for backward, as
# recomputing them takes a quarter of the projection's time and saves little; GPUs not measured.
CHUNK_NUMBERS, GPU_CHUNK_NUMBERS = 2**24, 2**28
CACHE_NUMBERS = 2**18


class TokenStatistics(NamedTuple):
    """Log-probability, entropy and KL of M tokens: nats, float32, differentiable."""

    token_logps: Tensor  # (M,) log p of the token
    entropy: Tensor  # (M,) of the distribution the token is drawn from; empty unless asked for
    kl: Tensor  # (M,) KL(p || ref), exact; empty without a reference


class Head(NamedTuple):
    """A projection onto the vocabulary."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)


def token_statistics(
    hidden: Tensor,  # (M, D), the states that predict the tokens
    head: Head,
    tokens: Tensor,  # (M,) int64
    *,
    temperature: float = 1.0,  # divides the logits, the reference's too
    with_entropy: bool = False,
    ref_hidden: Tensor | None = None,  # (M, D') of a reference; no gradient goes into it
    ref_head: Head | None = None,
    chunk_numbers: int = 0,  # logits (rows times vocabulary) held at once; 0: by the device
) -> TokenStatistics:
    """Log-probability, entropy and KL to a reference of next-token distributions, in one pass.

    The projection is computed in float32 whatever the dtype of its inputs: GPT-2's logits lie near
    -100, where neighbouring bfloat16 numbers are 0.5 nats apart.
    """
    on_cpu = hidden.device.type == "cpu"
    chunk_numbers = chunk_numbers or (CHUNK_NUMBERS if on_cpu else GPU_CHUNK_NUMBERS)
    ref_weight, ref_bias = (None, None) if ref_head is None else ref_head
    token_logps, entropy, kl = _Statistics.apply(
        hidden,
        head.weight,
        head.bias,
        tokens,
        temperature,
        with_entropy,
        None if ref_head is None else ref_hidden,
        ref_weight,
        ref_bias,
        chunk_numbers,
    )
    return TokenStatistics(token_logps, entropy, kl)


@contextmanager
def exact_tf32(hidden: Tensor) -> Iterator[None]:
    """Multiply in TF32 on a GPU inside the block, if hidden states (and weights) are bfloat16.

    TF32 rounds float32 operands to 10 bits of mantissa. A bfloat16 number has 7, so logits lose
    nothing: each product is exact, and sums are float32. In backward the float32 gradient of the
    logits does lose 2^-11 of each number (2^-10 if truncated), less than the 2^-9 of the bfloat16
    that its products are rounded to. By arithmetic the head takes 24 to 71% of an update on an H100
    without TF32, two thirds of that in backward. (The padded layout's backward stays float32:
    autograd multiplies there.)

    torch's switch holds for all threads and products of the process, so it is on only inside the
    block: a reward head, merged adapters and rotary tables have float32 operands.
    """
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if hidden.dtype == torch.bfloat16 else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


class _Statistics(torch.autograd.Function):
    """The statistics with their gradients.

    With p the policy's distribution over V tokens, q the reference's, and z the policy's logits:

        d log p_y / dz = 1_y - p      dH / dz = - p (log p + H)      dKL / dz = p (log p/q - KL)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        with_entropy: bool,
        ref_hidden: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
        chunk_numbers: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `token_statistics`."""
        num_rows = len(hidden)
        rows_at_once = max(1, chunk_numbers // len(weight))
        keep = num_rows <= rows_at_once
        tile_rows = rows_at_once  # of a temporary, which on a CPU should stay in a core's cache
        if hidden.device.type == "cpu":
            tile_rows = max(1, CACHE_NUMBERS // len(weight))
        scale = 1.0 / temperature
        sizes = (num_rows, num_rows * with_entropy, num_rows * (ref_weight is not None))
        token_logps, entropy, kl = (torch.zeros(size, device=hidden.device) for size in sizes)
        float_weight = weight.float()  # cast once, not in every chunk
        float_ref_weight = None if ref_weight is None else ref_weight.float()
        kept = None
        for rows in _chunks(num_rows, rows_at_once):
            logps = _logps(hidden[rows], float_weight, bias, scale)  # (m, V)
            token_logps[rows] = logps.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
            kept = logps if keep else None
            ref = None
            if ref_hidden is not None and float_ref_weight is not None:
                ref = _logps(ref_hidden[rows], float_ref_weight, ref_bias, scale)
            for tile in _chunks(len(logps), tile_rows) if with_entropy or ref is not None else ():
                at = slice(rows.start + tile.start, rows.start + tile.stop)
                probabilities = logps[tile].exp()
                if ref is not None:
                    kl[at] = (probabilities * (logps[tile] - ref[tile])).sum(-1)
                if with_entropy:
                    entropy[at] = -probabilities.mul_(logps[tile]).sum(-1)
        ctx.save_for_backward(
            hidden, weight, bias, tokens, entropy, kl, kept, ref_hidden, ref_weight, ref_bias
        )
        ctx.scale, ctx.rows_at_once = scale, rows_at_once
        ctx.set_materialize_grads(False)  # None for a statistic that no loss uses
        return token_logps, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states and of the head."""
        hidden, weight, bias, tokens, entropy, kl, kept = ctx.saved_tensors[:7]
        ref_hidden, ref_weight, ref_bias = ctx.saved_tensors[7:]
        grad_logps, grad_entropy, grad_kl = (
            None if grad is None else grad.unsqueeze(-1) for grad in grads
        )  # (M, 1)
        if grad_logps is None:
            grad_logps = torch.zeros(len(hidden), 1, device=hidden.device)
        float_weight = weight.float()
        float_ref_weight = None if grad_kl is None else ref_weight.float()
        grad_hidden = torch.empty_like(hidden)
        trains_head = ctx.needs_input_grad[1]
        new = torch.empty_like if len(hidden) else torch.zeros_like  # the first chunk fills it
        grad_weight = new(float_weight) if trains_head else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _chunks(len(hidden), ctx.rows_at_once):
            logps = kept
            if logps is None:
                logps = _logps(hidden[rows], float_weight, bias, ctx.scale)  # (m, V)
            factor = -grad_logps[rows]  # of p, (m, 1)
            if grad_entropy is not None:
                factor = factor - grad_entropy[rows] * (logps + entropy[rows].unsqueeze(-1))
            if grad_kl is not None and float_ref_weight is not None:
                ref = _logps(ref_hidden[rows], float_ref_weight, ref_bias, ctx.scale)
                gap = (logps - ref).sub_(kl[rows].unsqueeze(-1))
                factor = factor + grad_kl[rows] * gap
            grad_logits = logps.exp_().mul_(factor)  # overwrites the kept ones: one backward only
            grad_logits.scatter_add_(-1, tokens[rows].unsqueeze(-1), grad_logps[rows])
            if ctx.scale != 1.0:
                grad_logits *= ctx.scale
            with exact_tf32(hidden):
                grad_hidden[rows] = (grad_logits @ float_weight).to(hidden.dtype)
                if grad_weight is not None:
                    beta = float(rows.start > 0)
                    grad_weight.addmm_(grad_logits.t(), hidden[rows].float(), beta=beta)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _logps(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Log-probabilities (m, V), float32, of the tokens at a temperature.

    In place: on a CPU allocating a tensor of this size takes longer than computing it.
    """
    with exact_tf32(hidden):
        bias = None if bias is None else bias.float()
        logits = nn.functional.linear(hidden.float(), weight, bias)
    if scale != 1.0:
        logits *= scale
    return torch.log_softmax(logits, -1, out=logits)  # type: ignore[call-overload, no-any-return]


def _chunks(num_rows: int, rows_at_once: int) -> list[slice]:
    """Slices that cover the rows."""
    starts = range(0, num_rows, rows_at_once)
    return [slice(start, min(start + rows_at_once, num_rows)) for start in starts]
