"""Log-probabilities of pairs for DPO, those of the reference from disk where they are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from common.sampling import token_records
from common.scoring import Policy


@dataclass
class ReferenceScores:
    """What the frozen reference says of pairs: nothing where a loss needs none.

    Attributes:
        module: asked in training, None where all of its pairs were scored before.
        train: (rows, 2) float32 on the device, chosen first, where they were; tails count
            `ld_alpha`.
        held_out: (rows, 2).
        shown: of each token of the pairs in tables.
        first: (1, 2) of the first training pair, where every token counts 1.
    """

    module: Policy | AdapterReference | None = None
    train: Tensor | None = None
    held_out: Tensor | None = None
    shown: Any = None
    first: Tensor | None = None

    def of_batch(self, batch: AnyBatch, shared_lengths: Tensor, ld_alpha: float) -> Tensor:
        """Log-probabilities (N, 2) of a micro-batch's pairs; 0 without a reference."""
        if self.train is not None:
            return self.train[batch.places[::2] // 2]
        if self.module is None:
            return torch.zeros(len(batch.places) // 2, 2, device=shared_lengths.device)
        with torch.no_grad():
            return desensitised(self.module, batch, shared_lengths, ld_alpha).view(-1, 2)


def score_reference(
    reference: Policy | AdapterReference,
    weights: str,
    train_set: list[Example],
    eval_set: list[Example],
    shown: list[Example],
    rows: Sequence[int],
    tokenizer: Any,
    config: DPOConfig,
) -> ReferenceScores:
    """Score pairs ahead of training, with `precompute_ref_log_probs` all. Collective.

    Args:
        reference: frozen.
        weights: digest of its weights; unused without a cache.
        train_set: pairs to train on.
        eval_set: held-out ones.
        shown: those in tables.
        rows: of the training pairs, those that training takes.
        tokenizer: of the run.
        config: of the run.
    """
    score_all = partial(reference_logps, reference, weights, tokenizer, config)
    pad_id = tokenizer.pad_token_id
    found = ReferenceScores(reference)
    found.first = score.score_examples(reference, train_set[:1], config, pad_id, "reference")
    found.shown = token_records.token_logps(reference, shown, config, pad_id)
    if eval_set:
        found.held_out = score_all(eval_set, range(len(eval_set)))
    if config.precompute_ref_log_probs:
        logps = score_all(train_set, rows, ld_alpha=config.ld_alpha)
        # A filler has the place of row 0, which may be none of the rows.
        found.train = logps.nan_to_num().float().to(distributed.device())
        found.module = None
    return found


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
