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


class Scaling(NamedTuple):
    """What a model does to the output of its head, as its config names it."""

    scale: float = 1.0
    cap: float = 0.0  # logits lie between -cap and cap; 0: no cap

    @classmethod
    def of(cls, config: Any) -> "Scaling":
        """That of a causal language model with this config."""
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
        return cls(scale, getattr(config, "final_logit_softcapping", None) or 0.0)  # Gemma

    def apply(self, output: Tensor) -> Tensor:
        """Logits, in the place of the head's output."""
        if self.scale != 1.0:
            output *= self.scale
        return output.div_(self.cap).tanh_().mul_(self.cap) if self.cap else output


class Head(NamedTuple):
    """A projection onto the vocabulary."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    scaling: Scaling = Scaling()

    @classmethod
    def of(cls, lm: Any) -> "Head":
        """That of a causal language model."""
        head = lm.get_output_embeddings()
        return cls(head.weight, head.bias, Scaling.of(lm.config))


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
    token_logps, entropy, kl = _Statistics.apply(
        hidden,
        head.weight,
        head.bias,
        head,
        tokens,
        temperature,
        with_entropy,
        ref_hidden,
        ref_head,
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
        head: Head,  # again: its tensors get their gradients as arguments
        tokens: Tensor,
        temperature: float,
        with_entropy: bool,
        ref_hidden: Tensor | None,
        ref_head: Head | None,
        chunk_numbers: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `token_statistics`."""
        num_rows = len(hidden)
        rows_at_once = max(1, chunk_numbers // len(weight))
        keep = num_rows <= rows_at_once and not head.scaling.cap
        tile_rows = rows_at_once  # of a temporary, which on a CPU should stay in a core's cache
        if hidden.device.type == "cpu":
            tile_rows = max(1, CACHE_NUMBERS // len(weight))
        sizes = (num_rows, num_rows * with_entropy, num_rows * (ref_head is not None))
        token_logps, entropy, kl = (torch.zeros(size, device=hidden.device) for size in sizes)
        head, ref_head = _in_float32(head), ref_head and _in_float32(ref_head)
        kept = None
        for rows in _chunks(num_rows, rows_at_once):
            logps = _logps(_logits(hidden[rows], head), temperature)  # (m, V)
            token_logps[rows] = logps.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
            kept = logps if keep else None
            ref = None
            if ref_hidden is not None and ref_head is not None:
                ref = _logps(_logits(ref_hidden[rows], ref_head), temperature)
            for tile in _chunks(len(logps), tile_rows) if with_entropy or ref is not None else ():
                at = slice(rows.start + tile.start, rows.start + tile.stop)
                probabilities = logps[tile].exp()
                if ref is not None:
                    kl[at] = (probabilities * (logps[tile] - ref[tile])).sum(-1)
                if with_entropy:
                    entropy[at] = -probabilities.mul_(logps[tile]).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, tokens, entropy, kl, kept, ref_hidden)
        ctx.scaling, ctx.temperature = head.scaling, temperature
        ctx.ref_head, ctx.rows_at_once = ref_head, rows_at_once
        ctx.set_materialize_grads(False)  # None for a statistic that no loss uses
        return token_logps, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states and of the head."""
        hidden, weight, bias, tokens, entropy, kl, kept, ref_hidden = ctx.saved_tensors
        (scale, cap), temperature = ctx.scaling, ctx.temperature
        head = _in_float32(Head(weight, bias, ctx.scaling))
        grad_logps, grad_entropy, grad_kl = (
            None if grad is None else grad.unsqueeze(-1) for grad in grads
        )  # (M, 1)
        if grad_logps is None:
            grad_logps = torch.zeros(len(hidden), 1, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        trains_head = ctx.needs_input_grad[1]
        new = torch.empty_like if len(hidden) else torch.zeros_like  # the first chunk fills it
        grad_weight = new(head.weight) if trains_head else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _chunks(len(hidden), ctx.rows_at_once):
            logps, slope = kept, None
            if logps is None:
                logits = _logits(hidden[rows], head)  # (m, V)
                slope = 1 - (logits / cap).square() if cap else None  # of the cap
                logps = _logps(logits, temperature)
            factor = -grad_logps[rows]  # of p, (m, 1)
            if grad_entropy is not None:
                factor = factor - grad_entropy[rows] * (logps + entropy[rows].unsqueeze(-1))
            if grad_kl is not None:
                ref = _logps(_logits(ref_hidden[rows], ctx.ref_head), temperature)
                gap = (logps - ref).sub_(kl[rows].unsqueeze(-1))
                factor = factor + grad_kl[rows] * gap
            grad_logits = logps.exp_().mul_(factor)  # overwrites the kept ones: one backward only
            grad_logits.scatter_add_(-1, tokens[rows].unsqueeze(-1), grad_logps[rows])
            if slope is not None:
                grad_logits *= slope
            if scale != temperature:
                grad_logits *= scale / temperature
            with exact_tf32(hidden):
                grad_hidden[rows] = (grad_logits @ head.weight).to(hidden.dtype)
                if grad_weight is not None:
                    beta = float(rows.start > 0)
                    grad_weight.addmm_(grad_logits.t(), hidden[rows].float(), beta=beta)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _in_float32(head: Head) -> Head:
    """Cast once, not in every chunk."""
    bias = None if head.bias is None else head.bias.float()
    return head._replace(weight=head.weight.float(), bias=bias)


def _logits(hidden: Tensor, head: Head) -> Tensor:
    """Logits (m, V), float32.

    In place from here on: on a CPU allocating a tensor of this size takes longer than computing it.
    """
    with exact_tf32(hidden):
        output = nn.functional.linear(hidden.float(), head.weight, head.bias)
    return head.scaling.apply(output)


def _logps(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (m, V) of the tokens, in the place of their logits."""
    if temperature != 1.0:
        logits *= 1.0 / temperature
    return torch.log_softmax(logits, -1, out=logits)  # type: ignore[call-overload, no-any-return]


def _chunks(num_rows: int, rows_at_once: int) -> list[slice]:
    """Slices that cover the rows."""
    starts = range(0, num_rows, rows_at_once)
    return [slice(start, min(start + rows_at_once, num_rows)) for start in starts]
