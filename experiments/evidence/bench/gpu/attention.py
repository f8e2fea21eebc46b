"""The attention of shared prompts on this device against a dense mask in float64."""

import math
import random

import torch

from common import distributed
from common.batch import shared_prefix_batch
from common.model.shared_attention import branch_attention


def attention_difference(
    num_completions: int, dtype: torch.dtype, is_tail: bool, lengths: tuple[int, int, int]
) -> float:
    """Largest difference of outputs and gradients, each as a share of the largest value."""
    (shortest, longest, most), device = lengths, distributed.device()
    rng = random.Random(0)
    torch.manual_seed(0)
    # A token's id names its prompt and its completion, so that the mask needs no layout.
    prompts = [[100 * n] * rng.randint(shortest, longest) for n in range(4)]
    completions = [
        [[100 * n + k] * rng.randint(2, most) for k in range(1, num_completions + 1)]
        for n in range(4)
    ]
    batch = shared_prefix_batch(prompts, completions, 0).to(device)
    ids, positions = batch.input_ids[0], batch.position_ids[0]  # (T,)
    visible = (ids // 100 == ids[:, None] // 100) & (positions <= positions[:, None])
    visible &= (ids % 100 == 0) | (ids == ids[:, None])  # (T, T)
    columns = batch.layout.tail if is_tail else torch.arange(len(ids), device=device)
    tensors = torch.randn(3, 1, 12, len(ids), 64, device=device, dtype=dtype).unbind()
    grad = torch.randn_like(tensors[0])[:, :, columns]
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    output = branch_attention(
        inputs[0][:, :, columns], *inputs[1:], batch.layout, is_tail, scaling=0.125
    )
    output.backward(grad)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    scores = (exact[0] @ exact[1].transpose(-1, -2) * 0.125).masked_fill(~visible, -math.inf)
    expected = (scores.softmax(-1) @ exact[2])[:, :, columns]
    expected.backward(grad.double())
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))]
    shares = [(x.double() - y).abs().max() / y.abs().max() for x, y in pairs]
    return float(torch.stack(shares).detach().max())
