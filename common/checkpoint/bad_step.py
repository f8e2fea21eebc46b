"""A step whose numbers went bad: nothing is updated, and the rows are named and kept.

What there is to see of it:

    output_dir/failed/step_00000012/
        config.yaml           of the run
        checkpoint/           the state before the step
        batch_rank_0.jsonl    the completions that rank 0 had, and whether their scores were finite
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import distributed
from common.checkpoint.saver import Checkpointer
from common.errors import UserError
from common.model.optim import NonFiniteError
from common.padding import AnyBatch
from common.record.folder import CONFIG, save_config
from common.record.jsonl import json_line

MAX_NAMED = 8  # rows in a message


@contextmanager
def guarded(
    saver: Checkpointer, batches: Sequence[AnyBatch], rows: Iterable[Tensor], step: int
) -> Iterator[None]:
    """Around an update: if its numbers are not finite, keep what is needed to look. Collective.

    If it is not the first update of a rollout, the state is that before this update.

    Args:
        saver: of the run.
        batches: all that the update was computed from.
        rows: (B,) int64 for each batch, the numbers of the rows that its completions came from.
        step: that is being made, counted from 0.

    Raises:
        RuntimeError: a loss or gradient is not finite; nothing was changed.
    """
    try:
        yield
    except NonFiniteError as error:
        completions = scored_again(saver.model, batches, rows)
        bad = [one["row"] for one in completions if not one["is_finite"]]
        bad = sorted(set(distributed.from_all_ranks(bad)))
        told = "Every score of the batch is finite: look at rewards, reference and backward pass."
        if bad:
            named = ", ".join(map(str, bad[:MAX_NAMED])) + (", ..." if len(bad) > MAX_NAMED else "")
            told = f"Scores that are not finite: those of {len(bad)} rows, {named}."
        folder = Path(saver.config.output_dir) / "failed" / f"step_{step + 1:08d}"
        kept = f"The completions and the state before the step are in {folder}."
        try:
            keep(saver, completions, folder, step)
        except (UserError, OSError) as refusal:
            kept = f"They were not kept: {refusal}"
        raise RuntimeError(f"{error} {told} {kept}") from None


def scored_again(
    model: nn.Module, batches: Sequence[AnyBatch], rows: Iterable[Tensor]
) -> list[dict[str, Any]]:
    """This rank's real completions, with whether the model's scores of them are finite. Collective.

    The model is a policy or a reward model; batches and rows are those of `guarded`.
    """
    model.zero_grad(set_to_none=True)
    completions = []
    for i, (on_host, numbers) in enumerate(zip(batches, rows, strict=True)):
        batch = on_host.to(distributed.device())
        with torch.no_grad():
            scores = model(batch)
        scores = getattr(scores, "token_logps", scores)  # (B, C) or (B,)
        is_finite = scores.isfinite().view(len(batch.is_real), -1).all(1)  # (B,)
        for n in batch.is_real.nonzero().flatten().tolist():
            ids = batch.completion_ids[n][batch.completion_mask[n]].tolist()
            place, row, finite = int(batch.places[n]), int(numbers[n]), bool(is_finite[n])
            known = {"row": row, "place": place, "micro_batch": i, "is_finite": finite}
            completions.append({**known, "completion_ids": ids})
    return completions


def keep(
    saver: Checkpointer, completions: Sequence[dict[str, Any]], folder: Path, step: int
) -> None:
    """Write what there is to see; a `UserError` or `OSError` if the disk refuses. Collective."""
    if distributed.is_rank0():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that may have had more ranks
    distributed.barrier()
    saver.keep(step, folder / "checkpoint")
    with (folder / f"batch_rank_{distributed.rank()}.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json_line(one) for one in completions)
    if distributed.is_rank0():
        save_config(folder / CONFIG, saver.config)
