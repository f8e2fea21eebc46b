"""Log-probabilities of DPO's pairs under the frozen reference, computed once before training.

They are kept in `output_dir`, so that a resumed run need not compute them again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, scoring, self_checks
from common.data import Example
from common.forward import Policy, sequence_scores
from common.model import fsdp, load
from common.padding import AnyBatch
from common.text.example import Vocabulary

if TYPE_CHECKING:
    from common.config.dpo import DPOConfig
    from common.model.lora import AdapterReference


@dataclass
class ReferenceScores:
    """Log-probabilities of pairs under the frozen reference, None where no loss needs them.

    Chosen comes first.
    """

    train: Tensor | None = None  # (rows, 2) float32 on the device
    held_out: Tensor | None = None  # (rows, 2) float64 on the host
    shown: Any = None  # of each token of the pairs in the tables of samples
    first: Tensor | None = None  # (1, 2) of the first training pair

    def of_batch(self, batch: AnyBatch) -> Tensor:
        """Log-probabilities (N, 2) of a micro-batch's pairs; 0 without a reference."""
        pairs = batch.slots[::2] // 2
        return pairs.new_zeros(len(pairs), 2).float() if self.train is None else self.train[pairs]


def load_reference(
    config: "DPOConfig",
    ref_config: Any,
    mesh: DeviceMesh,
    vocabulary: Vocabulary,
    train_set: Sequence[Example],
    eval_set: Sequence[Example],
    order: data.BatchOrder,
    *,
    shown: list[Example],
    is_resumed: bool,
) -> tuple[ReferenceScores, Policy | None]:
    """Score all pairs with the frozen reference, and free it. Collective.

    The reference's model has the `ref_config`; training takes the rows of the train_set in the
    `order`; `shown` are the pairs in the tables of samples.

    Returns:
        The scores; and the policy, if it is the reference with adapters on (LoRA on one model).
    """
    from common.model.lora import AdapterReference
    from common.sampling import token_records

    path = config.ref_model_name_or_path
    is_policy = config.lora_r > 0 and config.model_name_or_path == path
    lm = load.load_policy(path, ref_config, config, trains=is_policy)
    whole = Policy(lm) if is_policy else Policy(lm).requires_grad_(False)
    policy = fsdp.shard(whole, config, mesh)
    reference = AdapterReference(policy) if is_policy else policy
    self_checks.only_tokens_matter(reference, config)

    scores = ReferenceScores()
    scores.first = scoring.score_examples(reference, train_set[:1], config, vocabulary, "reference")
    scores.shown = token_records.token_logps(reference, shown, config, vocabulary)
    if eval_set:
        held_out = partial(
            scoring.score_examples, reference, eval_set, config, vocabulary, "reference"
        )
        key = scores_key(eval_set, scores.first)
        rows: Sequence[int] = range(len(eval_set))
        scores.held_out = kept_logps(config, "held_out", held_out, rows, key, is_resumed)
    train = partial(training_logps, reference, train_set, order, config, vocabulary)
    rows = order.rows_until(order.total_steps(config))
    key = scores_key(train_set, scores.first)
    logps = kept_logps(config, "train", train, rows, key, is_resumed)
    # A filler stands for row 0, which may be none of the rows.
    scores.train = logps.nan_to_num().float().to(distributed.device())
    return scores, policy if is_policy else None


def training_logps(
    reference: "Policy | AdapterReference",
    train_set: Sequence[Example],
    order: data.BatchOrder,
    config: "DPOConfig",
    vocabulary: Vocabulary,
) -> Tensor:
    """Log-probabilities (rows, 2) of the pairs that a run trains on, NaN of others. Collective.

    They are scored in the micro-batches of the first epoch. So a policy that equals the reference
    gets the same numbers, rounding included, and the DPO loss starts at ln 2.
    """
    steps = range(min(order.total_steps(config), order.steps_per_epoch))
    batches = (
        batch
        for step in distributed.progress_bar("reference", None, items=steps)
        for batch in data.micro_batches(train_set, order.rows(step), config, vocabulary)
    )
    logps = scoring.score_batches(reference, batches, 2 * len(train_set), sequence_scores)
    is_seen = torch.zeros(len(train_set), 1, dtype=torch.bool)
    is_seen[order.rows_until(len(steps))] = True
    return logps.view(-1, 2).where(is_seen, torch.nan)


def scores_key(examples: Sequence[Example], first: Tensor) -> str:
    """Hash of all that the reference's scores depend on: tokens and weights.

    The scores `first` (1, 2) of the first training pair stand for the weights.
    """
    digest = hashlib.sha256(repr(first.tolist()).encode())
    for example in examples:
        digest.update(repr((example.prompt_ids, example.completions)).encode())
    return digest.hexdigest()


def kept_logps(
    config: "DPOConfig",
    name: str,
    compute: Callable[[], Tensor],
    rows: Sequence[int],
    key: str,
    is_resumed: bool,
) -> Tensor:
    """Result (N, 2) of `compute`, or in a resumed run its file's if the key agrees. Collective.

    Raises:
        RuntimeError: a log-probability of the `rows`, which the run needs, is not finite.
    """
    from common.record import output_lock
    from common.record.jsonl import replacing
    from common.record.run_folder import REFERENCE_LOGPS

    file = Path(config.output_dir) / REFERENCE_LOGPS.format(name)
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
