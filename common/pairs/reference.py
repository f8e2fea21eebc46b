"""Log-probabilities of pairs for DPO, those of the reference from disk where they are kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common import distributed
from common.data import Example
from common.evaluation import score
from common.losses import sequence_logps
from common.model.lora import AdapterReference
from common.padding import AnyBatch
from common.pairs import reference_cache
from common.pairs.config import DPOConfig
from common.scoring import Policy


def shorter_lengths(examples: list[Example]) -> Tensor:
    """Tokens of the shorter completion of each pair, (rows,) on the device."""
    lengths = [min(map(len, example.completions)) for example in examples]
    return torch.tensor(lengths, device=distributed.device())


def desensitised(
    model: nn.Module, batch: AnyBatch, shared_lengths: Tensor, ld_alpha: float
) -> Tensor:
    """Log-probabilities (B,) of completions whose tails count `ld_alpha`."""
    shared = shared_lengths[batch.places // 2]  # (B,)
    token_logps = model(batch).token_logps  # (B, C)
    return sequence_logps(token_logps, batch.completion_mask, shared, ld_alpha=ld_alpha)


def reference_logps(
    reference: Policy | AdapterReference,
    weights: str,
    tokenizer: Any,
    config: DPOConfig,
    examples: list[Example],
    rows: Sequence[int],
    ld_alpha: float = 1.0,
) -> Tensor:
    """Log-probabilities of pairs under the reference, from disk where they are kept. Collective.

    Args:
        reference: Frozen.
        weights: Digest of its weights; unused without a cache.
        tokenizer: Of the run.
        config: Of the run.
        examples: N pairs.
        rows: Those that are scored.
        ld_alpha: What a token beyond the shorter completion's length counts.

    Returns:
        (N, 2) float64 on the host, NaN in other rows.

    Raises:
        RuntimeError: one is not finite.
    """
    shared_lengths = shorter_lengths(examples)
    file = reference_cache.file_for(
        config.ref_cache_dir, weights, examples, tokenizer, config, ld_alpha=ld_alpha
    )
    logps = reference_cache.complete(
        file,
        len(examples),
        rows,
        lambda missing: score.score_examples(
            reference,
            examples,
            config,
            tokenizer.pad_token_id,
            "reference",
            missing,
            lambda model, batch: desensitised(model, batch, shared_lengths, ld_alpha),
        ),
    )
    is_finite = logps.isfinite().all(1).tolist()
    broken = [row for row in rows if not is_finite[row]]
    if broken:
        raise RuntimeError(
            f"the reference gives pair {broken[0]} (counted from 0) the log-probabilities "
            f"{logps[broken[0]].tolist()}; they must be finite."
        )
    return logps
