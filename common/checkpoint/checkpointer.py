"""Checkpoints of a run: saving, loading, and saving at a request to stop.

A checkpoint is sharded (`torch.distributed.checkpoint`, as safetensors). It holds the trained
parameters (under LoRA: the adapters), optimiser state, the number of finished steps, the sums for
the next line of metrics, and a reference that changes during the run. Row order and noise are
functions of the step, so nothing else is needed. `common/checkpoint/layout.py` describes the files,
`resume.py` chooses the checkpoint to resume from.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from common import distributed
from common.checkpoint import hf_folder, layout, resume, sharded_state
from common.checkpoint.sharded_state import State, cause, restore_state
from common.config.stages import TrainConfig
from common.errors import UserError
from common.model import fsdp, optim
from common.record import output_lock
from common.record.jsonl import keep_lines, num_lines
from common.record.metrics import Accumulator
from common.record.run_folder import MANIFEST
from common.shutdown import signals


class SaveClock:
    """When a run was saved last, and how long its steps take: when to save again."""

    def __init__(self, interval: float) -> None:
        """Take the seconds between two saves, 0 for none."""
        self.interval = interval
        self._saved = self._began = -1.0  # the last save, and the current step; -1: no step yet
        self._cycle = 0.0  # seconds from the beginning of a step to that of the next

    def begin_step(self) -> None:
        """Note that a step begins; with the first one, training does."""
        now = time.monotonic()
        if self._began < 0:
            self._saved = now
        else:
            self._cycle = now - self._began
        self._began = now

    def note_save(self) -> None:
        """Note a save."""
        self._saved = time.monotonic()

    def is_due(self) -> bool:
        """Whether to save at the end of this step: at that of the next one it would be late."""
        cycle = max(self._cycle, time.monotonic() - self._began)
        return 0 < self.interval < self._began + 2 * cycle - self._saved


class Checkpointer:
    """Saves a run, loads it again, and saves it when a signal asks it to stop. One per rank.

    `save` copies the state to the host's memory, and a thread writes it while training goes on. The
    thread has a separate process group for its collectives. One checkpoint is written at a time.
    `output_dir` must be one folder for all ranks: on several hosts, of a shared file system.

    Model and `reference`, which changes during the run, are sharded. `settings`, on rank 0, are the
    exported folder's files except weights (`export.settings_of`).
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: Accumulator,
        reference: nn.Module | None = None,
        settings: Mapping[str, bytes] | None = None,
        **facts: Any,  # which a checkpoint's folder has too
    ) -> None:
        """Make the thread and its process group. Collective."""
        self.facts = facts
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
        self._step = -1  # the current one, counted from 0
        self._sums: dict[str, torch.Tensor] = {}  # of the metrics when it began
        self._saved_step = -1
        self.num_hooks: int | None = None  # see `before_hook`; None: all were called
        self._vote = signals.StopVote()
        self._clock = SaveClock(60 * config.save_minutes)

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the state after `step` finished steps. Collective.

        With `async_save` it returns when a copy is made. A later `stop_if_asked`, `save` or `wait`
        then raises the UserError of writing it.
        """
        self._sums = self.metrics.snapshot()
        self._save(step)

    def save_before(self, step: int, before_hook: State | None = None) -> str:
        """Save the state before the unfinished `step`, if it is not saved yet. Collective.

        With a `before_hook` it is that before a hook of the step before, which failed. Returns
        `resume_advice` for it, or raises a UserError as `save` does.
        """
        self._begin(step)
        if self._saved_step != step:
            self._save(step, before_hook)
        self.wait()
        return self.resume_advice(step)

    def before_hook(self, number: int) -> State:
        """What a checkpoint holds from before a hook of a step: so many were called, and lines."""
        return {"num_hooks": number, "lines": self._count_lines()}

    def _count_lines(self) -> dict[str, int]:
        """Lines of the records by name, on rank 0, and {} elsewhere."""
        return {path.name: num_lines(path) for path in self._records()}

    def _records(self) -> list[Path]:
        """The records that are there, on rank 0."""
        paths = map(self.output_dir.joinpath, layout.RECORDS if distributed.is_rank0() else ())
        return [path for path in paths if path.exists()]

    def _begin(self, step: int) -> None:
        """Remember the metrics' sums when a step begins."""
        if step != self._step:
            self._step, self._sums = step, self.metrics.snapshot()
            self._clock.begin_step()

    def _save(self, step: int, before_hook: State | None = None) -> None:
        self.wait()
        fsdp.reshard(self.model)
        optim.check_weights(self.model, step)
        state = sharded_state.trained_state(self.model, self.optimizer)
        if self.reference is not None:
            fsdp.reshard(self.reference)
            state["reference"] = sharded_state.whole_state(self.reference)
        rank_sums = {name: sums.tolist() for name, sums in self._sums.items()}
        contents: State = {
            "step": step,
            "stage": type(self.config).__name__,
            "config": asdict(self.config),
            **self.facts,
            "world_size": distributed.world_size(),
            "num_hooks": None,
            "lines": self._count_lines(),
            "sums": distributed.from_all_ranks([rank_sums]),  # by rank: addition rounds by order
        }
        contents |= before_hook or {}
        for path in self._records():
            layout.flush(path)  # after a power cut it must hold the checkpoint's steps
        if self.config.async_save:
            state = BlockingAsyncStager().stage(state)
        self._saved_step = step
        self._clock.note_save()
        folder = layout.folder_of(self.output_dir, step)
        self._writing = self._thread.submit(self._write, state, contents, folder)
        if not self.config.async_save:
            self.wait()

    def _write(self, state: State, contents: State, folder: Path) -> None:
        """Write a checkpoint, rename it once it is complete, remove old ones. Collective.

        An error on one rank is raised on all of them, so that none waits for it.
        """
        partial = folder.with_name(folder.name + layout.PARTIAL)
        if distributed.is_rank0():
            shutil.rmtree(partial, ignore_errors=True)  # of a run with more ranks
        dist.barrier(group=self._group)
        try:
            writer = sharded_state.ShardWriter(str(partial), save_distributed=True)
            save_shards(state, storage_writer=writer, process_group=self._group)
            entries = self._on_all_ranks(lambda: self._describe_files(partial))
            contents["files"] = {name: entry for rank in entries for name, entry in rank.items()}
            self._on_all_ranks(lambda: self._complete(partial, folder, contents))
            return
        except (CheckpointException, OSError) as error:
            reason = cause(error)
        if distributed.is_rank0():
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the checkpoint {folder} could not be written ({reason}); earlier ones are whole."
        )

    def _describe_files(self, partial: Path) -> dict[str, Any]:
        """Manifest entries of this rank's files by name; rank 0 writes the settings first."""
        mine = [*partial.glob(f"shard-{distributed.rank() + 1:05d}-*")]
        if distributed.is_rank0():
            hf_folder.write_settings(self.settings, partial / layout.SETTINGS)
            mine += [partial / layout.SETTINGS / name for name in self.settings]
        return {path.relative_to(partial).as_posix(): layout.describe(path) for path in mine}

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
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

    def _complete(self, partial: Path, folder: Path, contents: State) -> None:
        """Write the manifest, rename the folder and remove old checkpoints, on rank 0."""
        if not distributed.is_rank0():
            return
        unseen = [name for name in sorted(contents["files"]) if not (partial / name).exists()]
        if unseen:
            raise OSError(
                f"{unseen[0]} is not to be seen from rank 0: all hosts need one --output_dir"
            )
        (partial / MANIFEST).write_text(json.dumps(contents, indent=1))
        layout.put_in_place(partial, folder)
        try:
            layout.remove_old(self.output_dir, self.config.keep_last)
        except OSError as error:
            print(f"warning: old checkpoints could not be removed ({cause(error)}).", flush=True)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; a UserError if it could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """`wait`, and end the thread and its process group. Collective."""
        self.wait()
        self._thread.shutdown()
        self._vote.end()
        distributed.barrier()  # no rank closes a connection from which another still reads
        group, self._group = self._group, None
        dist.destroy_process_group(group)

    # ---- loading ---------------------------------------------------------------------------------

    def load(self, folder: Path | None, total_steps: int = 0) -> int:
        """Load a checkpoint in place; returns its finished steps, 0 for None. Collective.

        The number of ranks may have changed. Learning rate, betas and weight decay stay those of
        this run's config. In `output_dir`, later and unfinished checkpoints are removed, and the
        records are cut to the lines that the checkpoint counted, to none without one of that
        folder. Of a run that ended at its step and now goes on, to `total_steps`, the last
        evaluation and samples stay too, unless one failed and is made again (`num_hooks`). A
        UserError as `restore_state`, or if another run is writing to `output_dir`.
        """
        manifest: State = {"step": 0, "lines": {}}
        if folder is not None:
            manifest = restore_state(folder, self.model, self.optimizer, self.reference)
            self._restore_sums(manifest["sums"])
            self.num_hooks = manifest.get("num_hooks")
            distributed.print_rank0(f"resuming after step {manifest['step']} from {folder}")
            if folder.parent.resolve() == (self.output_dir / "checkpoints").resolve():
                self._saved_step = manifest["step"]
            else:
                manifest["lines"] = {}
        if distributed.is_rank0():
            output_lock.take(self.output_dir)
            resume.set_aside_other_model(self.config)
            # Checkpoints go first: none may stay without the records of its steps.
            if removed := layout.remove_after(self.output_dir, manifest["step"]):
                names = ", ".join(path.name for path in removed)
                print(f"removed checkpoints of {self.output_dir}: {names}", flush=True)
            step = manifest["step"]
            lines = manifest["lines"] if step else {}  # what is before the first step comes again
            for name in layout.RECORDS:
                goes_on = name in lines and step < total_steps  # else the end is measured again
                goes_on = goes_on and self.num_hooks is None
                last_step = step if goes_on else -1
                keep_lines(self.output_dir / name, lines.get(name, 0), last_step)
        distributed.barrier()
        return int(manifest["step"])

    def _restore_sums(self, sums_by_rank: list[dict[str, list[float]]]) -> None:
        """Restore each rank's sums; rank 0 takes all if the number of ranks has changed."""
        sums: dict[str, list[float]] = {}
        if len(sums_by_rank) == distributed.world_size():
            sums = sums_by_rank[distributed.rank()]
        elif distributed.is_rank0():
            for name in sorted({name for rank_sums in sums_by_rank for name in rank_sums}):
                of_ranks = [rank_sums[name] for rank_sums in sums_by_rank if name in rank_sums]
                sums[name] = np.sum(of_ranks, axis=0).tolist()
        self.metrics.restore(sums)

    # ---- stopping --------------------------------------------------------------------------------

    def stop_if_asked(self, step: int, *, at_once: bool = False) -> None:
        """Before a forward pass: save and stop if any rank received a signal. Collective.

        Sums and gradients of the unfinished step are dropped: it must not have made an update.
        `step` is counted from 0: so many are finished. `at_once`: see `StopVote.agreed_signal`.
        Raises Stopped once the run is saved; a UserError if an earlier checkpoint was not written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        self._begin(step)
        wants_save = distributed.is_rank0() and self._clock.is_due()
        if not (number := self._vote.agreed_signal(wants_save=wants_save, at_once=at_once)):
            return
        self.optimizer.zero_grad(set_to_none=True)
        advice, name = self.save_before(step), signal.Signals(number).name
        self.close()
        raise signals.Stopped(f"stopped after step {step} by {name}; {advice}.", number)

    def is_save_due(self) -> bool:
        """At the end of a step: whether to save by `save_minutes`, on rank 0's clock. Collective.

        Several ranks go by what rank 0 knew before the step's last forward pass.
        """
        is_alone = distributed.world_size() == 1
        return self._clock.is_due() if is_alone else self._vote.agreed_save()

    def resume_advice(self, step: int) -> str:
        """The command that resumes from the checkpoint of `step`, "" without that checkpoint."""
        if self._saved_step != step:
            return ""
        is_default = self.config.resume_from_checkpoint in ("auto", "latest")
        flag = "" if is_default else " with --resume_from_checkpoint auto"
        return f"the same command{flag} goes on from {layout.folder_of(self.output_dir, step)}"
