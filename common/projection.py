"""From hidden states to log-probabilities without keeping the logits.

Of a prompt of 270 tokens and a completion of 35 only the completion's tokens are projected onto the
vocabulary. What a loss needs of the logits are a few numbers per token, so small batches keep their
logits for backward, and larger ones recompute them, a chunk of rows at a time: their memory does
not grow with rows times vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Logits kept or made at once, in numbers: 64 MiB of float32. Below it recomputing costs time (a
# quarter of the projection's) and saves little.
CHUNK_NUMBERS = 2**24


class TokenStatistics(NamedTuple):
    """What a policy says of M tokens, in nats, float32, each with its gradient."""

    token_logps: Tensor  # (M,) log p of the token
    entropy: Tensor  # (M,) of the distribution the token is drawn from; empty unless asked for
    kl: Tensor  # (M,) KL(p || ref), exact; empty without a reference


class Head(NamedTuple):
    """A projection onto the vocabulary."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)


def token_statistics(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    ref_hidden: Tensor | None = None,
    ref_head: Head | None = None,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> TokenStatistics:
    """Log-probability, entropy and KL to a reference of next-token distributions, in one pass.

    The projection is computed in float32 whatever the dtype of its inputs: GPT-2's logits lie near
    -100, where neighbouring bfloat16 numbers are 0.5 nats apart.

    Args:
        hidden: (M, D), the states that predict the tokens.
        head: of the policy.
        tokens: (M,) int64.
        temperature: divides the logits, the reference's too.
        with_entropy: also compute the entropy.
        ref_hidden: (M, D') of a reference; no gradient goes into it.
        ref_head: of the reference.
        chunk_numbers: logits (rows times vocabulary) held at once.
    """
    ref = (None, None, None) if ref_head is None else (ref_hidden, *ref_head)
    results = _Statistics.apply(
        hidden, *head, tokens, temperature, with_entropy, *ref, max(1, chunk_numbers)
    )
    return TokenStatistics(*results)


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
        scale = 1.0 / temperature
        token_logps, entropy, kl, lse = (
            torch.zeros(size, device=hidden.device)
            for size in (
                num_rows,
                num_rows if with_entropy else 0,
                num_rows if ref_weight is not None else 0,
                num_rows,
            )
        )
        float_weight = weight.float()  # cast once, not in every chunk
        float_ref_weight = None if ref_weight is None else ref_weight.float()
        kept = None
        for rows in _chunks(num_rows, rows_at_once):
            logits = _logits(hidden[rows], float_weight, bias, scale)  # (m, V)
            lse[rows] = logits.logsumexp(-1)
            chosen = logits.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
            token_logps[rows] = chosen - lse[rows]
            kept = logits if keep else None
            if with_entropy or ref_weight is not None:
                logps = logits - lse[rows].unsqueeze(-1)
                probabilities = logps.exp()
                if with_entropy:
                    entropy[rows] = -(probabilities * logps).sum(-1)
                if ref_hidden is not None and float_ref_weight is not None:
                    ref = _logits(ref_hidden[rows], float_ref_weight, ref_bias, scale)
                    gap = logps - torch.log_softmax(ref, -1)
                    kl[rows] = (probabilities * gap).sum(-1)
        ctx.save_for_backward(
            hidden, weight, bias, tokens, lse, entropy, kl, kept, ref_hidden, ref_weight, ref_bias
        )
        ctx.scale, ctx.rows_at_once = scale, rows_at_once
        ctx.set_materialize_grads(False)  # None for what no loss uses
        return token_logps, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states and of the head."""
        hidden, weight, bias, tokens, lse, entropy, kl, kept, *of_ref = ctx.saved_tensors
        ref_hidden, ref_weight, ref_bias = of_ref
        grad_logps, grad_entropy, grad_kl = (
            None if grad is None else grad.unsqueeze(-1) for grad in grads
        )  # (M, 1)
        if grad_logps is None:
            grad_logps = torch.zeros_like(lse).unsqueeze(-1)
        float_weight = weight.float()
        float_ref_weight = None if grad_kl is None else ref_weight.float()
        grad_hidden = torch.empty_like(hidden)
        trains_head = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(float_weight) if trains_head else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _chunks(len(hidden), ctx.rows_at_once):
            logits = kept
            if logits is None:
                logits = _logits(hidden[rows], float_weight, bias, ctx.scale)
            logps = logits - lse[rows].unsqueeze(-1)  # (m, V)
            factor = -grad_logps[rows]  # of p, (m, 1)
            if grad_entropy is not None:
                factor = factor - grad_entropy[rows] * (logps + entropy[rows].unsqueeze(-1))
            if grad_kl is not None and float_ref_weight is not None:
                ref = _logits(ref_hidden[rows], float_ref_weight, ref_bias, ctx.scale)
                gap = logps - torch.log_softmax(ref, -1)
                factor = factor + grad_kl[rows] * (gap - kl[rows].unsqueeze(-1))
            grad_logits = logps.exp_().mul_(factor)
            grad_logits.scatter_add_(-1, tokens[rows].unsqueeze(-1), grad_logps[rows])
            grad_logits *= ctx.scale
            grad_hidden[rows] = (grad_logits @ float_weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[rows].float())
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Logits (m, V), float32, divided by the temperature."""
    logits = nn.functional.linear(hidden.float(), weight, None if bias is None else bias.float())
    return logits if scale == 1.0 else logits.mul_(scale)


def _chunks(num_rows: int, rows_at_once: int) -> list[slice]:
    """Slices that cover the rows."""
    return [slice(start, start + rows_at_once) for start in range(0, num_rows, rows_at_once)]
