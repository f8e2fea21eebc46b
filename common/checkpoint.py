"""Saving a run so that it can go on: checkpoints, what to resume from, and stopping when asked.

A checkpoint is sharded (`torch.distributed.checkpoint`, as safetensors) and holds the trained
parameters (under LoRA: the adapters), optimiser state, the number of finished steps, what was
summed up for the next line of metrics, and a reference that changes in the course of the run; row
order and noise are functions of the step, so nothing else is needed. What it is on disk is in
`common/checkpoint_files.py`.
"""

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from common import checkpoint_files as files
from common import distributed, fsdp, lora, signals
from common.config import TrainConfig, UserError, config_dict, gist
from common.jsonl import read_jsonl
from common.metrics import Accumulator
from common.run_state import State, reference_state, restore_state, trained_state

RECORDS = ("metrics.jsonl", "samples.jsonl")  # of the run, a line for each thing that was logged


def find(config: TrainConfig) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means, None to start at step 0. Collective.

    A damaged one is named, and the one before it taken. What is there is rank 0's to say.

    Raises:
        UserError: the folder that was named is no whole checkpoint, all of them are damaged, or
            `auto` finds one of a run with another config.
    """
    wanted = config.resume_from_checkpoint
    if wanted in ("", "none"):
        return None
    if wanted not in ("auto", "latest"):
        if reason := files.damage(Path(wanted)):
            raise UserError(f"--resume_from_checkpoint {wanted} is no whole checkpoint: {reason}.")
        return Path(wanted)
    candidates = distributed.from_rank0(files.newest_first(Path(config.output_dir)))
    for folder in candidates:
        reason = files.damage(folder)
        if not reason:
            if wanted == "auto":
                refuse_other_run(folder, config)
            return Path(folder)
        distributed.print_rank0(f"warning: the checkpoint {folder} is skipped: {reason}.")
    if candidates:
        raise UserError(
            f"no checkpoint in {config.output_dir} is whole; --resume_from_checkpoint none starts "
            "anew."
        )
    if wanted == "latest":
        distributed.print_rank0(f"no checkpoint in {config.output_dir} yet: starting at step 0")
    return None


def refuse_other_run(folder: Path, config: TrainConfig) -> None:
    """Raise a UserError if a checkpoint's config makes another run than this one."""
    manifest = distributed.from_rank0(
        files.read_manifest(folder) if distributed.is_rank0() else None
    )
    differences = files.changed_fields(manifest["config"], config)
    if manifest["stage"] != type(config).__name__:
        differences = [f"the stage was {manifest['stage']} and is {type(config).__name__}"]
    if differences:
        raise UserError(
            f"{folder} is of another run: {'; '.join(differences)}; give the same values to go on "
            "with it, another --output_dir, --resume_from_checkpoint latest to go on with the new "
            "values, or none to start anew."
        )


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
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: Accumulator,
        reference: nn.Module | None = None,
    ) -> None:
        """From now on a signal stops the run by `stop_if_asked`. Collective."""
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.metrics = metrics
        self.reference = reference
        self.output_dir = Path(config.output_dir)
        self._group = distributed.another_group()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._step = -1  # the step that is being made
        self._sums: dict[str, torch.Tensor] = {}  # of the metrics when it began
        self._saved_step = -1
        self._vote: tuple[Any, torch.Tensor] | None = None  # whether any rank got a signal
        signals.listen()

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the state after `step` finished steps. Collective.

        Returns when a copy is made, with `async_save`; an error of writing it is raised by the next
        call of a method.

        Raises:
            UserError: the disk refuses.
        """
        self._sums = self.metrics.snapshot()
        self._save(step, files.folder_of(self.output_dir, step))

    def keep_before(self, step: int, folder: Path) -> None:
        """Save the state before the unfinished step `step` to a folder of its own. Collective."""
        self._save(step, folder)
        self.wait()

    def _save(self, step: int, folder: Path) -> None:
        self.wait()
        fsdp.reshard(self.model)
        state = trained_state(self.model, self.optimizer)
        if self.reference is not None:
            fsdp.reshard(self.reference)
            state["reference"] = reference_state(self.reference)
        contents: State = {
            "step": step,
            "stage": type(self.config).__name__,
            "config": config_dict(self.config),
            "world_size": distributed.world_size(),
            "has_reference": self.reference is not None,
            "adapters": lora.description(self.model),
            "metric": None,
            "lines": {},
            # Of each rank: sums in another order would be other sums.
            "sums": distributed.from_all_ranks(
                [{name: sums.tolist() for name, sums in self._sums.items()}]
            ),
        }
        if distributed.is_rank0():
            contents["lines"] = flushed_records(self.output_dir)
            contents["metric"] = self._logged_metric(step)
        if self.config.async_save:
            state = BlockingAsyncStager().stage(state)
        self._saved_step = step
        self._writing = self._thread.submit(self._write, state, contents, folder)
        if not self.config.async_save:
            self.wait()

    def _write(self, state: State, contents: State, folder: Path) -> None:
        """Write a checkpoint, give it its name once it is whole, remove old ones. Collective."""
        partial = folder.with_name(folder.name + files.PARTIAL)
        try:
            writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
            save_shards(state, storage_writer=writer, process_group=self._group)
            mine = partial.glob(f"shard-{distributed.rank() + 1:05d}-*")
            parts: list[Any] = [None] * distributed.world_size()
            described = {file.name: files.describe(file) for file in mine}
            dist.all_gather_object(parts, described, group=self._group)
            if distributed.is_rank0():
                shards = {name: part[name] for part in parts for name in part}
                files.write_manifest(partial, {**contents, "files": shards})
                files.put_in_place(partial, folder)
                best = self._best()
                files.remove_old(self.output_dir, self.config.keep_last, best)
            dist.barrier(group=self._group)
        except (CheckpointException, OSError) as error:
            if distributed.is_rank0():
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"the checkpoint {folder} could not be written ({cause(error)}); the one before it "
                "is whole, and the same command goes on from there."
            ) from error

    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            UserError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the writing; with `load_best_model_at_end`, load the best parameters. Collective."""
        self.wait()
        self._thread.shutdown()
        if self._vote is not None:
            self._vote[0].wait()
        if self.config.metric_for_best_model:
            self._end_with_best()

    # ---- the best --------------------------------------------------------------------------------

    def _logged_metric(self, step: int) -> float | None:
        """The metric that tells the best checkpoint, if it was logged at this step."""
        name = self.config.metric_for_best_model
        lines = read_jsonl(self.output_dir / "metrics.jsonl") if name else []
        values = [line[name] for line in lines if line["step"] == step and name in line]
        return values[-1] if values else None

    def _best(self) -> Path | None:
        """The checkpoint with the best metric; of equal ones the oldest."""
        if not self.config.metric_for_best_model:
            return None
        sign = 1 if "loss" in self.config.metric_for_best_model else -1
        values = {}
        for folder in reversed(files.newest_first(self.output_dir)):
            value = files.read_manifest(folder)["metric"]
            if value is not None:
                values[folder] = sign * value
        return min(values, key=values.__getitem__) if values else None

    def _end_with_best(self) -> None:
        name = self.config.metric_for_best_model
        best = distributed.from_rank0(self._best() if distributed.is_rank0() else None)
        if best is None:
            raise UserError(
                f"--metric_for_best_model is {name}, which was never logged at the step of a "
                "checkpoint; it must be a metric of an evaluation, with --save_steps a multiple of "
                "its interval."
            )
        distributed.print_rank0(f"the checkpoint with the best {name} is {best}")
        if self.config.load_best_model_at_end:
            restore_state(best, self.model, self.optimizer, self.reference)

    # ---- resuming --------------------------------------------------------------------------------

    def load(self, folder: Path | None) -> int:
        """Load a checkpoint in place; returns the finished steps, 0 for None. Collective.

        The number of ranks may differ from the one that saved. Learning rate, betas and weight
        decay stay those of this run's config. Later checkpoints in `output_dir` are removed.

        Args:
            folder: from `find`.

        Raises:
            UserError: the checkpoint has a reference and this run updates none, or the reverse; or
                it has other adapters.
        """
        step = 0
        if folder is not None:
            manifest = restore_state(folder, self.model, self.optimizer, self.reference)
            step = int(manifest["step"])
            self._restore_sums(manifest["sums"])
            if folder.parent.resolve() == (self.output_dir / "checkpoints").resolve():
                self._saved_step = step
                if distributed.is_rank0():
                    for name, num_lines in manifest["lines"].items():
                        keep_lines(self.output_dir / name, num_lines)
            distributed.print_rank0(f"resuming after step {step} from {folder}")
        if distributed.is_rank0() and (removed := files.remove_after(self.output_dir, step)):
            names = ", ".join(path.name for path in removed)
            print(f"removed checkpoints of {self.output_dir} beyond step {step}: {names}")
        distributed.barrier()
        return step

    def _restore_sums(self, of_ranks: list[dict[str, list[float]]]) -> None:
        """Give every rank its sums back; rank 0 takes all where the number of ranks differs."""
        if len(of_ranks) == distributed.world_size():
            self.metrics.restore(of_ranks[distributed.rank()])
            return
        names = {name for sums in of_ranks for name in sums}
        nothing = [0.0, 0.0]
        totals = {
            n: [sum(x) for x in zip(*(s.get(n, nothing) for s in of_ranks), strict=True)]
            for n in names
        }
        mine = totals if distributed.is_rank0() else dict.fromkeys(names, nothing)
        self.metrics.restore(mine)

    # ---- stopping --------------------------------------------------------------------------------

    def stop_if_asked(self, step: int) -> None:
        """Before a forward pass: save and stop if any rank was sent a signal. Collective.

        What was computed of the step so far is dropped, so no update of it may have been made.

        Args:
            step: that is being made, counted from 0, which is the number of finished steps.

        Raises:
            Stopped: the run is saved.
            UserError: an earlier checkpoint could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        if step != self._step:
            self._step, self._sums = step, self.metrics.snapshot()
        if not self._is_stop_agreed():
            return
        self.optimizer.zero_grad(set_to_none=True)
        folder = files.folder_of(self.output_dir, step)
        if self._saved_step != step:
            self._save(step, folder)
        self.wait()
        raise signals.Stopped(
            f"stopped after step {step} by {signals.received() or 'a signal to another rank'}; the "
            f"same command goes on from {folder}."
        )

    def _is_stop_agreed(self) -> bool:
        """Whether any rank had got a signal when this was last called: no rank waits for others."""
        if distributed.world_size() == 1:
            return bool(signals.received())
        is_agreed = False
        if self._vote is not None:
            work, num_signals = self._vote
            work.wait()
            is_agreed = bool(num_signals > 0)
        num_signals = torch.tensor(float(bool(signals.received())))
        self._vote = (dist.all_reduce(num_signals, async_op=True), num_signals)
        return is_agreed


def flushed_records(output_dir: Path) -> dict[str, int]:
    """The lines of each file of records, which are on the disk when this returns."""
    lines = {}
    for name in RECORDS:
        path = output_dir / name
        if path.exists():
            files.flush(path)
            lines[name] = len(read_jsonl(path))
    return lines


def keep_lines(path: Path, num_lines: int) -> None:
    """Cut a file of records after so many lines: what followed will be logged again."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        for _ in range(num_lines):
            if not file.readline().endswith(b"\n"):
                return
        file.truncate()


def cause(error: BaseException) -> str:
    """The reason of a failed save in a few words: that of the first rank which has one."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    first: Any = next(iter(failures.values()))[0] if failures else error
    if isinstance(first, OSError) and first.errno is not None:
        return os.strerror(first.errno)
    return gist(first)
