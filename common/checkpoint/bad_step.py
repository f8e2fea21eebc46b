"""A step whose numbers went bad: nothing is updated, the rows are named, and it can be made again.

    output_dir/failed/step_00000012/
        config.yaml           of the run
        checkpoint/           the state before the step
        batch_rank_0.jsonl    the completions that rank 0 had, and whether their scores were finite

Row order and noise are functions of the step, so `--replay` of that folder makes the same batch
from the state before it and watches the output of every layer.
"""

import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import distributed
from common.checkpoint.saver import Checkpointer
from common.config import TrainConfig, UserError, save_config
from common.exits import signals
from common.model.optim import NonFiniteError
from common.padding import AnyBatch
from common.record.jsonl import json_line, read_jsonl

MAX_NAMED = 8  # rows in a message


@contextmanager
def guarded(
    saver: Checkpointer, batches: Sequence[AnyBatch], rows: Iterable[Tensor], step: int
) -> Iterator[None]:
    """Around an update: if its numbers are not finite, keep what is needed to look. Collective.

    If it is not the first update of a rollout, the state is that before this update: a replay
    samples from it anew, and says that the batch is another one.

    Args:
        saver: of the run.
        batches: all that the update was computed from.
        rows: (B,) int64 for each batch, the numbers of the rows that its completions came from.
        step: that is being made, counted from 0.

    Raises:
        RuntimeError: a loss or gradient is not finite; nothing was changed.
        Stopped: this is a replay.
    """
    config = saver.config
    try:
        yield
    except NonFiniteError as error:
        completions = scored_again(saver.model, batches, rows)
        folder = Path(config.replay or Path(config.output_dir) / "failed" / f"step_{step + 1:08d}")
        told = f"{error} {describe(completions)}"
        if config.replay:
            raise signals.Stopped(f"replayed: {told} {compare(completions, folder)}") from None
        try:
            keep(saver, completions, folder, step)
        except (UserError, OSError) as refusal:
            raise RuntimeError(f"{told} It cannot be made again: {refusal}") from None
        place = shlex.quote(str(folder))
        raise RuntimeError(
            f"{told} To make the step again, watching every layer: the same launch with only "
            f"--config {place}/config.yaml --replay {place}"
        ) from None


def scored_again(
    model: nn.Module, batches: Sequence[AnyBatch], rows: Iterable[Tensor]
) -> list[dict[str, Any]]:
    """This rank's real completions, with whether the model's scores of them are finite. Collective.

    Args:
        model: a policy or a reward model.
        batches: as for `guarded`.
        rows: as for `guarded`.
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


def describe(completions: Sequence[dict[str, Any]]) -> str:
    """Which rows of all ranks have scores that are not finite. Collective."""
    bad = [one["row"] for one in completions if not one["is_finite"]]
    bad = sorted(set(distributed.from_all_ranks(bad)))
    if not bad:
        return "Every score of the batch is finite: look at rewards, reference and backward pass."
    named = ", ".join(map(str, bad[:MAX_NAMED])) + (", ..." if len(bad) > MAX_NAMED else "")
    return f"Scores that are not finite: those of {len(bad)} rows, {named}."


def keep(
    saver: Checkpointer, completions: Sequence[dict[str, Any]], folder: Path, step: int
) -> None:
    """Write what a replay needs; a `UserError` or `OSError` if the disk refuses. Collective."""
    if distributed.is_rank0():
        shutil.rmtree(
            folder, ignore_errors=True
        )  # of an earlier run, which may have had more ranks
    distributed.barrier()
    saver.keep_before(step, folder / "checkpoint")
    with (folder / f"batch_rank_{distributed.rank()}.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json_line(one) for one in completions)
    if distributed.is_rank0():
        save_config(folder / "config.yaml", saver.config)


def compare(completions: Sequence[dict[str, Any]], folder: Path) -> str:
    """Whether the batch of a replay is the one that was kept. Collective."""
    kept = [one for path in folder.glob("batch_rank_*.jsonl") for one in read_jsonl(path)]
    now = distributed.from_all_ranks(list(completions))
    batches = [
        sorted((one["row"], one["place"], one["completion_ids"]) for one in side)
        for side in (kept, now)
    ]
    return f"The batch {'is' if batches[0] == batches[1] else 'is not'} the one that was kept."


def watch_replay(model: nn.Module, config: TrainConfig) -> None:
    """In a replay, print the first layer whose output is not finite."""
    if not config.replay:
        return
    seen: set[str] = set()

    def look(name: str, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not bool(tensor.isfinite().all()) and not seen:
                seen.add(name)
                print(f"rank {distributed.rank()}: the output of {name} is not finite", flush=True)

    for name, part in model.named_modules():
        if not list(part.children()):
            part.register_forward_hook(lambda _, __, output, name=name: look(name, output))
