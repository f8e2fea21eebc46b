"""Saving a run so that it can go on, going on, and stopping when asked.

A checkpoint is sharded (`torch.distributed.checkpoint`, as safetensors) and holds the trained
parameters (under LoRA: the adapters), optimiser state, the number of finished steps, what was
summed up for the next line of metrics, and a reference that changes in the course of the run; row
order and noise are functions of the step, so nothing else is needed. What it is on disk is in
`common/checkpoint/layout.py`, which one a run goes on from in `resume.py`.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from common import distributed
from common.checkpoint import best as best_checkpoint
from common.checkpoint import hf_folder, layout, resume
from common.checkpoint.sharded_state import (
    ShardWriter,
    State,
    reference_state,
    restore_state,
    trained_state,
)
from common.config import TrainConfig
from common.errors import UserError, gist
from common.model import fsdp, lora
from common.record import output_lock
from common.record.jsonl import keep_lines, num_lines
from common.record.metrics import Accumulator
from common.shutdown import signals


class Checkpointer:
    """Saves a run, resumes it, and stops it when it is asked to. Every rank has one.

    What is saved is copied to the host's memory, so that a thread can write it while training goes
    on; the thread's collectives have a process group of their own. One checkpoint is written at a
    time. `output_dir` must be one folder for all ranks: on several hosts, of a shared file system.

    Args:
        config: of the run.
        model: sharded.
        optimizer: of the model.
        metrics: what the run sums up between two lines of `metrics.jsonl`.
        reference: a sharded model that is not what the run started with any more.
        settings: files that an export of the checkpoint takes, on rank 0 (`hf_folder.settings_of`).
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: Accumulator,
        reference: nn.Module | None = None,
        settings: Mapping[str, bytes] | None = None,
    ) -> None:
        """Make the thread and its process group. Collective."""
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.metrics = metrics
        self.reference = reference
        self.settings = settings or {}
        self.output_dir = Path(config.output_dir)
        self._group = distributed.another_group()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._step = -1  # the step that is being made
        self._sums: dict[str, torch.Tensor] = {}  # of the metrics when it began
        self._saved_step = -1
        self._vote: tuple[Any, torch.Tensor] | None = None  # whether any rank got a signal

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the state after `step` finished steps. Collective.

        Returns when a copy is made, with `async_save`; an error of writing it is then raised by a
        later `stop_if_asked`, `save` or `wait`, as soon as it is known.

        Raises:
            UserError: the disk refuses.
        """
        self._sums = self.metrics.snapshot()
        self._save(step)

    def keep(self, step: int) -> str:
        """Save the state before the unfinished step `step`; how to go on from it. Collective.

        Nothing is done if it is a checkpoint already.

        Raises:
            UserError: the disk refuses.
        """
        if self._saved_step != step:
            self._save(step)
        self.wait()
        return self.how_to_go_on(step)

    def _save(self, step: int) -> None:
        self.wait()
        fsdp.reshard(self.model)
        state = trained_state(self.model, self.optimizer)
        if self.reference is not None:
            fsdp.reshard(self.reference)
            state["reference"] = reference_state(self.reference)
        own_sums = {name: sums.tolist() for name, sums in self._sums.items()}
        contents: State = {
            "step": step,
            "stage": type(self.config).__name__,
            "config": asdict(self.config),
            "world_size": distributed.world_size(),
            "has_reference": self.reference is not None,
            "adapters": lora.description(self.model),
            "lines": {},
            "sums": distributed.from_all_ranks([own_sums]),  # in another order: other sums
        }
        if distributed.is_rank0():
            for path in filter(Path.exists, map(self.output_dir.joinpath, layout.RECORDS)):
                layout.flush(path)  # it must not be behind the checkpoint after a power cut
                contents["lines"][path.name] = num_lines(path)
        if self.config.async_save:
            state = BlockingAsyncStager().stage(state)
        self._saved_step = step
        folder = layout.folder_of(self.output_dir, step)
        self._writing = self._thread.submit(self._write, state, contents, folder)
        if not self.config.async_save:
            self.wait()

    def _write(self, state: State, contents: State, folder: Path) -> None:
        """Write a checkpoint, give it its name once it is whole, remove old ones. Collective.

        A failure of one rank is raised on all, so that none waits for it.
        """
        partial = folder.with_name(folder.name + layout.PARTIAL)
        if distributed.is_rank0():
            shutil.rmtree(partial, ignore_errors=True)  # of a run with more ranks
        dist.barrier(group=self._group)
        try:
            writer = ShardWriter(str(partial), save_distributed=True)
            save_shards(state, storage_writer=writer, process_group=self._group)
            by_rank = self._all_of(lambda: self._finish_files(partial))
            contents["files"] = {name: entry for files in by_rank for name, entry in files.items()}
            self._all_of(lambda: self._name(partial, folder, contents))
            return
        except (CheckpointException, OSError) as error:
            reason = cause(error)
        if distributed.is_rank0():
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the checkpoint {folder} could not be written ({reason}); earlier ones are whole."
        )

    def _finish_files(self, partial: Path) -> dict[str, Any]:
        """Write the settings, on rank 0, and describe the files of this rank by their names."""
        mine = [*partial.glob(f"shard-{distributed.rank() + 1:05d}-*")]
        if distributed.is_rank0():
            hf_folder.write_settings(self.settings, partial / layout.SETTINGS)
            mine += [partial / layout.SETTINGS / name for name in self.settings]
        return {path.relative_to(partial).as_posix(): layout.describe(path) for path in mine}

    def _all_of(self, action: Callable[[], Any]) -> list[Any]:
        """Results of an action by rank; the OSError of one rank is raised on all. Collective."""
        results: list[Any] = [None] * distributed.world_size()
        try:
            result = action()
        except OSError as error:
            result = error
        dist.all_gather_object(results, result, group=self._group)
        for result in results:
            if isinstance(result, OSError):
                raise result
        return results

    def _name(self, partial: Path, folder: Path, contents: State) -> None:
        """On rank 0 give the shards a manifest and their name, and remove what is too old."""
        if not distributed.is_rank0():
            return
        unseen = [name for name in sorted(contents["files"]) if not (partial / name).exists()]
        if unseen:
            raise OSError(
                f"{unseen[0]} is not to be seen from rank 0: all hosts need one --output_dir"
            )
        layout.write_manifest(partial, contents)
        layout.put_in_place(partial, folder)
        best = best_checkpoint.ranking(self.output_dir, self.config.metric_for_best_model)
        try:
            layout.remove_old(self.output_dir, self.config.keep_last, best[0] if best else None)
        except OSError as error:
            print(f"warning: old checkpoints could not be removed ({cause(error)}).", flush=True)

    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            UserError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> int:
        """End the writing; with `load_best_model_at_end`, load the best parameters. Collective.

        Returns:
            Of which step they are; 0 if none were loaded.

        Raises:
            UserError: the disk refused.
        """
        self.wait()
        self._end()
        name = self.config.metric_for_best_model
        if not name:
            return 0
        for best in distributed.from_rank0(best_checkpoint.ranking(self.output_dir, name)):
            if reason := layout.damage(best):
                distributed.print_rank0(f"warning: the checkpoint {best} is skipped: {reason}.")
                continue
            distributed.print_rank0(f"the checkpoint with the best {name} is {best}")
            if not self.config.load_best_model_at_end:
                return 0
            restore_state(best, self.model, self.optimizer, self.reference)
            return layout.step_of(best)
        distributed.print_rank0(
            f"warning: --metric_for_best_model {name} was not logged at the step of any whole "
            "checkpoint; the last step is exported."
        )
        return 0

    def _end(self) -> None:
        """End the thread, the last vote and the process group with its threads. Collective."""
        self._thread.shutdown()
        if self._vote is not None:
            self._vote[0].wait()
        distributed.barrier()  # nobody closes a connection from which another still reads
        group, self._group = self._group, None
        dist.destroy_process_group(group)

    # ---- resuming --------------------------------------------------------------------------------

    def load(self, folder: Path | None) -> int:
        """Load a checkpoint in place; returns the finished steps, 0 for None. Collective.

        The number of ranks may differ from the one that saved. Learning rate, betas and weight
        decay stay those of this run's config. Later checkpoints in `output_dir` and unfinished ones
        are removed, and its records are cut to what had been logged.

        Args:
            folder: from `resume.find`.

        Raises:
            UserError: the checkpoint has a reference and this run updates none, or the reverse; or
                it has other adapters, or does not fit the model; or another run is writing to
                `output_dir`.
        """
        manifest: State = {"step": 0, "lines": {}}
        if folder is not None:
            manifest = restore_state(folder, self.model, self.optimizer, self.reference)
            self._restore_sums(manifest["sums"])
            distributed.print_rank0(f"resuming after step {manifest['step']} from {folder}")
            if folder.parent.resolve() == (self.output_dir / "checkpoints").resolve():
                self._saved_step = manifest["step"]
            else:
                manifest["lines"] = {}
        if distributed.is_rank0():
            output_lock.take(self.output_dir)
            resume.set_aside_other_model(self.config)
            # In this order: a checkpoint must not outlive the records of its steps.
            if removed := layout.remove_after(self.output_dir, manifest["step"]):
                names = ", ".join(path.name for path in removed)
                print(f"removed checkpoints of {self.output_dir}: {names}", flush=True)
            for name, number in manifest["lines"].items():
                keep_lines(self.output_dir / name, number)
        distributed.barrier()
        return int(manifest["step"])

    def _restore_sums(self, of_ranks: list[dict[str, list[float]]]) -> None:
        """Give every rank its sums back; rank 0 takes all where the number of ranks differs."""
        sums: dict[str, list[float]] = {}
        if len(of_ranks) == distributed.world_size():
            sums = of_ranks[distributed.rank()]
        elif distributed.is_rank0():
            for name in sorted({name for rank_sums in of_ranks for name in rank_sums}):
                pairs = [rank_sums[name] for rank_sums in of_ranks if name in rank_sums]
                sums[name] = [sum(numbers) for numbers in zip(*pairs, strict=True)]
        self.metrics.restore(sums)

    # ---- stopping --------------------------------------------------------------------------------

    def stop_if_asked(self, step: int, *, at_once: bool = False) -> None:
        """Before a forward pass: save and stop if any rank was sent a signal. Collective.

        What was computed of the step so far is dropped, so no update of it may have been made.

        Args:
            step: that is being made, counted from 0, which is the number of finished steps.
            at_once: wait for the other ranks' word, before something long; else the word of the
                last call counts, and no rank waits for another.

        Raises:
            Stopped: the run is saved.
            UserError: an earlier checkpoint could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        if step != self._step:
            self._step, self._sums = step, self.metrics.snapshot()
        if not self._is_stop_agreed(at_once):
            return
        self.optimizer.zero_grad(set_to_none=True)
        cause_of_stop = signals.received() or "a signal to another rank"
        how_to_go_on = self.keep(step)
        self._end()
        raise signals.Stopped(f"stopped after step {step} by {cause_of_stop}; {how_to_go_on}.")

    def how_to_go_on(self, step: int) -> str:
        """The command that resumes from the checkpoint after `step` steps; "" if there is none."""
        if self._saved_step != step:
            return ""
        is_found = self.config.resume_from_checkpoint in ("auto", "latest")
        flag = "" if is_found else " with --resume_from_checkpoint auto"
        return f"the same command{flag} goes on from {layout.folder_of(self.output_dir, step)}"

    def _is_stop_agreed(self, at_once: bool) -> bool:
        """Whether any rank had got a signal when it was last asked, or now. Collective."""
        if distributed.world_size() == 1:
            return bool(signals.received())
        num_signals = torch.tensor(float(bool(signals.received())))
        votes = [self._vote, (dist.all_reduce(num_signals, async_op=True), num_signals)]
        self._vote = votes[1]
        ended = [vote for vote in votes[: 1 + at_once] if vote is not None]
        for work, _ in ended:  # no collective is let go of before its end
            work.wait()
        return bool(ended) and bool(ended[-1][1] > 0)


def cause(error: BaseException) -> str:
    """The reason of a failed save in a few words: that of the first rank which has one."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    first: Any = next(iter(failures.values()))[0] if failures else error
    if isinstance(first, OSError) and first.errno is not None:
        return os.strerror(first.errno)
    return gist(first)
