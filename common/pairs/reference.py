"""Log-probabilities of DPO's pairs under the frozen reference, computed once before training.

They are kept in `output_dir`, so that a resumed run need not compute them again.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common import data, distributed, scoring, self_checks
from common.data import Example
from common.forward import Policy, sequence_scores
from common.padding import AnyBatch
from common.text.example import Vocabulary

if TYPE_CHECKING:
    from common.config.dpo import DPOConfig
    from common.model.lora import AdapterReference


class PairReference:
    """Log-probabilities of pairs under the frozen reference, chosen first; 0 until `score`."""

    def __init__(
        self,
        train_set: Sequence[Example],
        eval_set: Sequence[Example],
        order: data.BatchOrder,  # in which training takes the rows
        config: "DPOConfig",
        vocabulary: Vocabulary,
    ) -> None:
        """Start with the zeros that losses without a reference take."""
        self.train_set, self.eval_set, self.order = train_set, eval_set, order
        self.config, self.vocabulary = config, vocabulary
        self.train = torch.zeros(len(train_set), 2, device=distributed.device())  # float32
        self.held_out = torch.zeros(len(eval_set), 2, dtype=torch.float64)  # on the host
        self.first: Tensor | None = None  # (1, 2) of the first training pair

    def of_batch(self, batch: AnyBatch) -> Tensor:
        """Log-probabilities (N, 2) of a micro-batch's pairs."""
        return self.train[batch.pairs.rows]

    def score(self, model: "Policy | AdapterReference", *, is_resumed: bool) -> None:
        """Score all pairs with the reference's model. Collective."""
        from common.record.run_folder import REFERENCE_LOGPS

        config, vocabulary, order = self.config, self.vocabulary, self.order
        self_checks.only_tokens_matter(model, config)

        def scored(examples: Sequence[Example]) -> Tensor:
            return scoring.score_examples(model, examples, config, vocabulary, "reference")

        def kept(
            name: str,
            examples: Sequence[Example],
            rows: Sequence[int],
            compute: Callable[[], Tensor],
        ) -> Tensor:
            file = Path(config.output_dir) / REFERENCE_LOGPS.format(name)
            return kept_logps(file, compute, rows, scores_key(examples, first), is_resumed)

        self.first = first = scored(self.train_set[:1])
        if self.eval_set:
            rows: Sequence[int] = range(len(self.eval_set))
            self.held_out = kept("held_out", self.eval_set, rows, lambda: scored(self.eval_set))
        rows = order.rows_until(order.total_steps(config))
        logps = kept("train", self.train_set, rows, lambda: self.training_logps(model))
        # A filler stands for row 0, which may be none of the rows.
        self.train = logps.nan_to_num().float().to(distributed.device())

    def training_logps(self, model: "Policy | AdapterReference") -> Tensor:
        """Log-probabilities (rows, 2) of the pairs that a run trains on, NaN of others. Collective.

        They are scored in the micro-batches of the first epoch. So a policy that equals the
        reference gets the same numbers, rounding included, and the DPO loss starts at ln 2.
        """
        train_set, order, config = self.train_set, self.order, self.config
        steps = range(min(order.total_steps(config), order.steps_per_epoch))
        batches = (
            batch
            for step in distributed.progress_bar("reference", None, items=steps)
            for batch in data.micro_batches(train_set, order.rows(step), config, self.vocabulary)
        )
        # By slot, 2 n + k
        logps = scoring.score_batches(model, batches, 2 * len(train_set), sequence_scores)
        is_seen = torch.zeros(len(train_set), 1, dtype=torch.bool)
        is_seen[order.rows_until(len(steps))] = True
        return logps.view(-1, 2).where(is_seen, torch.nan)  # NaN: not scored, also in the file


def scores_key(examples: Sequence[Example], first: Tensor) -> str:
    """Hash of all that the reference's scores depend on: tokens and weights.

    The scores `first` (1, 2) of the first training pair stand for the weights.
    """
    digest = hashlib.sha256(repr(first.tolist()).encode())
    for example in examples:
        digest.update(repr((example.prompt_ids, example.completions)).encode())
    return digest.hexdigest()


def kept_logps(
    file: Path, compute: Callable[[], Tensor], rows: Sequence[int], key: str, is_resumed: bool
) -> Tensor:
    """Result (N, 2) of `compute`, or in a resumed run the file's if the key agrees. Collective.

    Raises:
        RuntimeError: a log-probability of the `rows`, which the run needs, is not finite.
    """
    from common.record import output_lock
    from common.record.jsonl import replacing

    is_kept = is_resumed and distributed.is_rank0() and file.exists()
    kept = distributed.from_rank0(torch.load(file, weights_only=True) if is_kept else {})
    logps: Tensor | None = kept["logps"] if kept.get("key") == key else None
    if logps is None or logps[rows].isnan().any():  # NaN: max_steps is larger now
        logps = compute()
        if distributed.is_rank0():
            output_lock.take(file.parent)
            with replacing(file) as unfinished:
                torch.save({"key": key, "logps": logps}, unfinished)
    is_finite = logps.isfinite().all(1).tolist()
    broken = [row for row in rows if not is_finite[row]]
    if broken:
        raise RuntimeError(
            f"the reference gives pair {broken[0]} (counted from 0) the log-probabilities "
            f"{logps[broken[0]].tolist()}; they must be finite."
        )
    return logps
