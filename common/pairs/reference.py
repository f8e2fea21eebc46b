"""Log-probabilities of DPO's pairs under the frozen reference, computed once before training.

They are kept in `output_dir`, so that a resumed run need not compute them again.
"""

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, self_checks
from common.batch import AnyBatch
from common.config.dpo import DPOConfig
from common.evaluation import scoring
from common.forward import Policy, sequence_scores
from common.model import fsdp, load
from common.model.lora import AdapterReference
from common.record import output_lock
from common.record.jsonl import replacing
from common.record.run_folder import REFERENCE_LOGPS
from common.text.example import Example, Vocabulary


@dataclass(frozen=True)
class ReferenceLogps:
    """Log-probabilities of pairs under the frozen reference, chosen first."""

    train: Tensor  # (rows, 2) float32, on the device; 0 of a pair that is not trained on
    held_out: Tensor  # (rows, 2) float64, on the host
    first: Tensor | None = None  # (1, 2) of the first training pair; None: no reference, all are 0

    def of_batch(self, batch: AnyBatch) -> Tensor:
        """Log-probabilities (N, 2) of a micro-batch's pairs."""
        return self.train[batch.pairs.indices]


class PairSets(NamedTuple):
    """The pairs to score."""

    train_set: Sequence[Example]
    eval_set: Sequence[Example]
    order: data.BatchOrder  # in which training takes the rows


def no_reference(pairs: PairSets) -> ReferenceLogps:
    """What a loss without a reference gets."""
    train = torch.zeros(len(pairs.train_set), 2, device=distributed.device())
    return ReferenceLogps(train, torch.zeros(len(pairs.eval_set), 2, dtype=torch.float64))


def frozen_logps(
    model_config: Any,
    pairs: PairSets,
    config: DPOConfig,
    vocabulary: Vocabulary,
    mesh: DeviceMesh,
    *,
    is_resumed: bool,
) -> ReferenceLogps:
    """Read the reference's model, score the pairs with it, and give its memory back. Collective."""
    lm = load.load_policy(config.reference_path, model_config, config)
    frozen = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
    logps = reference_logps(frozen, pairs, config, vocabulary, is_resumed=is_resumed)
    del lm, frozen
    gc.collect()  # FSDP's units refer to one another: else it stays in memory
    return logps


def reference_logps(
    model: Policy | AdapterReference,
    pairs: PairSets,
    config: DPOConfig,
    vocabulary: Vocabulary,
    *,
    is_resumed: bool,
) -> ReferenceLogps:
    """Score held-out pairs, and those trained on, with the reference's model. Collective.

    Scores of this model and of these pairs that a resumed run kept are not computed again.
    """
    train_set, eval_set, order = pairs
    self_checks.only_tokens_matter(model, config)
    first = scoring.score_examples(model, train_set[:1], config, vocabulary, "reference")
    rows = order.rows_until(order.total_steps(config))
    key = scores_key([*train_set, *eval_set], rows, first)
    file = Path(config.output_dir) / REFERENCE_LOGPS
    compute = partial(compute_logps, model, pairs, config, vocabulary)
    logps = kept_logps(file, compute, key, is_resumed=is_resumed)
    train = logps["train"].float().to(distributed.device())
    return ReferenceLogps(train, logps["held_out"], first)


def compute_logps(
    model: Policy | AdapterReference, pairs: PairSets, config: DPOConfig, vocabulary: Vocabulary
) -> dict[str, Tensor]:
    """Log-probabilities of all pairs, (rows, 2) by set; 0 of one not trained on. Collective.

    The training pairs are scored in the micro-batches of the first epoch. So a policy that equals
    the reference gets the same numbers, rounding included, and the DPO loss starts at ln 2.
    """
    train_set, eval_set, order = pairs
    steps = range(min(order.total_steps(config), order.steps_per_epoch))
    batches = (
        batch
        for step in distributed.progress_bar("reference", None, items=steps)
        for batch in data.micro_batches(train_set, order.rows(step), config, vocabulary)
    )
    # (2 rows,): completion k of pair n is at 2 n + k
    logps = scoring.score_batches(model, batches, 2 * len(train_set), sequence_scores)
    held_out = torch.zeros(0, 2, dtype=torch.float64)
    if eval_set:
        held_out = scoring.score_examples(model, eval_set, config, vocabulary, "reference")
    return {"train": logps.view(-1, 2), "held_out": held_out}


def scores_key(examples: Sequence[Example], rows: Sequence[int], first: Tensor) -> str:
    """Hash of tokens, rows trained on, and scores `first` (1, 2), which stand for the weights."""
    digest = hashlib.sha256(repr((rows, first.tolist())).encode())
    for example in examples:
        digest.update(repr((example.prompt_ids, example.completions)).encode())
    return digest.hexdigest()


def kept_logps(
    file: Path, compute: Callable[[], dict[str, Tensor]], key: str, *, is_resumed: bool
) -> dict[str, Tensor]:
    """Result of `compute`, which must be finite, or in a resumed run the file's. Collective."""
    is_kept = is_resumed and distributed.is_rank0() and file.exists()
    kept = distributed.from_rank0(torch.load(file, weights_only=True) if is_kept else {})
    if kept.get("key") != key:
        kept = {"key": key, "logps": compute()}
        if distributed.is_rank0():
            output_lock.take(file.parent)
            with replacing(file) as unfinished:
                torch.save(kept, unfinished)
    logps: dict[str, Tensor] = kept["logps"]
    for name, of_pairs in logps.items():
        for pair in (~of_pairs.isfinite().all(1)).nonzero().flatten().tolist()[:1]:
            raise RuntimeError(
                f"the reference gives pair {pair} (counted from 0) of {name} the log-probabilities "
                f"{of_pairs[pair].tolist()}; they must be finite."
            )
    return logps
