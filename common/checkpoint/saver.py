"""Saving a run so that it can go on: checkpoints, what to resume from, and stopping when asked.

A checkpoint is sharded (`torch.distributed.checkpoint`, as safetensors) and holds the trained
parameters (under LoRA: the adapters), optimiser state, the number of finished steps, what was
summed up for the next line of metrics, and a reference that changes in the course of the run; row
order and noise are functions of the step, so nothing else is needed. What it is on disk is in
`common/checkpoint/files.py`.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from common import distributed
from common.checkpoint import best as best_checkpoint
from common.checkpoint import files
from common.checkpoint.state import State, reference_state, restore_state, trained_state
from common.config import TrainConfig, UserError, gist
from common.exits import signals
from common.model import fsdp, lora
from common.record import output_lock
from common.record.folder import read_config, read_environment
from common.record.jsonl import keep_lines, num_lines
from common.record.metrics import Accumulator


def find(config: TrainConfig) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means, None to start at step 0. Collective.

    A damaged one is named, and the one before it taken. What is there is rank 0's to say.

    Raises:
        UserError: the folder that was named is no whole checkpoint, all of them are damaged,
            `auto` finds one of a run with another config, or there is none and `output_dir` has a
            model of another config, or of another stage.
    """
    if distributed.is_rank0():
        refuse_other_stage(config)
    wanted = config.resume_from_checkpoint
    candidates = distributed.from_rank0(files.newest_first(Path(config.output_dir)))
    if wanted not in ("auto", "latest"):
        if distributed.was_restarted() and has_own(candidates, config):
            wanted = "auto"  # torchrun repeats a command whose run has come further since
        elif wanted in ("", "none"):
            return None
        else:
            return named(Path(wanted), config, candidates)
    for folder in candidates:
        reason = files.damage(folder)
        if not reason:
            refuse_other_run(folder, config, any_config=wanted == "latest")
            return Path(folder)
        distributed.print_rank0(f"warning: the checkpoint {folder} is skipped: {reason}.")
    if candidates:
        raise UserError(
            f"no checkpoint in {config.output_dir} is whole; --resume_from_checkpoint none starts "
            "anew."
        )
    if distributed.is_rank0():
        refuse_other_model(config)
    if wanted == "latest":
        distributed.print_rank0(f"no checkpoint in {config.output_dir} yet: starting at step 0")
    return None


def refuse_other_stage(config: TrainConfig) -> None:
    """Raise a UserError if the run would replace a model that no run of this stage has written."""
    output_dir, stage = Path(config.output_dir), type(config).__name__
    if not has_model(output_dir):
        return
    try:
        environment = read_environment(output_dir)
    except ValueError:
        environment = {}
    written_by = environment.get("stage", stage) if environment else "no run"
    if written_by != stage:
        raise UserError(
            f"--output_dir {output_dir} has a folder 'model' of {written_by}, and this run of "
            f"{stage} would replace it; name another folder."
        )


def has_model(output_dir: Path) -> bool:
    """Whether it has a finished model; a folder that waits for one is empty."""
    return (output_dir / "model").is_dir() and any((output_dir / "model").iterdir())


def of_other_model(config: TrainConfig) -> list[str]:
    """How the run of a finished model in `output_dir` differs from this one; empty without it."""
    output_dir = Path(config.output_dir)
    if not has_model(output_dir):
        return []
    try:
        saved = read_config(output_dir)
    except ValueError:
        return []
    return files.changed_fields(saved, config) if saved else []


def refuse_other_model(config: TrainConfig) -> None:
    """Raise a UserError if the run would replace a finished model of another config."""
    if differences := of_other_model(config):
        raise UserError(
            f"{Path(config.output_dir) / 'model'} is of another run: {'; '.join(differences)}; "
            "give the same values to make it again, another --output_dir, or "
            "--resume_from_checkpoint none to replace it."
        )


def set_aside(config: TrainConfig) -> None:
    """Rename a finished model of another config, which would stand beside this run's config."""
    if not of_other_model(config):
        return
    for name in ("model", "adapter"):
        place = (Path(config.output_dir) / name).resolve()
        if place.is_dir():
            files.discard(before := place.with_name(f"{place.name}.before"))
            place.rename(before)
            print(f"the {name} of another run is in {before} now", flush=True)


def has_own(folders: Sequence[Path], config: TrainConfig) -> bool:
    """Whether a checkpoint is of a run of this stage with this config. Collective."""

    def is_own(folder: Path) -> bool:
        try:
            return not files.other_run(files.read_manifest(folder), config)
        except (ValueError, KeyError):  # it cannot be read, or another version has written it
            return False

    found = distributed.is_rank0() and any(map(is_own, folders))
    return bool(distributed.from_rank0(found))


def named(folder: Path, config: TrainConfig, others: Sequence[Path]) -> Path:
    """The folder of `--resume_from_checkpoint`, checked. Collective.

    Raises:
        UserError: it is not whole, of another stage, or `output_dir` has checkpoints of another
            run, which would be mixed up with those of this one.
    """
    if reason := files.damage(folder):
        raise UserError(f"--resume_from_checkpoint {folder} is no whole checkpoint: {reason}.")
    refuse_other_run(folder, config, any_config=True)
    if others and folder.parent.resolve() != others[0].parent.resolve():
        raise UserError(
            f"--output_dir {config.output_dir} has checkpoints of its own, and "
            f"--resume_from_checkpoint is {folder}; name a new --output_dir, or auto to go on from "
            "the newest of its own."
        )
    return folder


def refuse_other_run(folder: Path, config: TrainConfig, *, any_config: bool) -> None:
    """Raise a UserError if a checkpoint is of another stage, or of another config. Collective."""
    manifest = distributed.from_rank0(
        files.read_manifest(folder) if distributed.is_rank0() else None
    )
    if differences := files.other_run(manifest, config, any_config=any_config):
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
        """Make the thread and its process group. Collective."""
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

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the state after `step` finished steps. Collective.

        Returns when a copy is made, with `async_save`; an error of writing it is then raised by a
        later `stop_if_asked`, `save` or `wait`, as soon as it is known.

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
            "config": asdict(self.config),
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
            metric = self.config.metric_for_best_model
            records = [
                path for path in map(self.output_dir.joinpath, files.RECORDS) if path.exists()
            ]
            for path in records:
                files.flush(path)  # they must not be behind the checkpoint after a power cut
            contents["lines"] = {path.name: num_lines(path) for path in records}
            contents["metric"] = best_checkpoint.logged(self.output_dir, metric, step)
        if self.config.async_save:
            state = BlockingAsyncStager().stage(state)
        self._saved_step = step
        self._writing = self._thread.submit(self._write, state, contents, folder)
        if not self.config.async_save:
            self.wait()

    def _write(self, state: State, contents: State, folder: Path) -> None:
        """Write a checkpoint, give it its name once it is whole, remove old ones. Collective.

        What fails on one rank is told to all of them, so that none waits for it.
        """
        partial = folder.with_name(folder.name + files.PARTIAL)
        if distributed.is_rank0():
            shutil.rmtree(partial, ignore_errors=True)  # of a run with more ranks
        dist.barrier(group=self._group)
        try:
            writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
            save_shards(state, storage_writer=writer, process_group=self._group)
            shards = self._describe_shards(partial)
            reason = self._finish(partial, folder, {**contents, "files": shards})
        except (CheckpointException, OSError) as error:
            reason = cause(error)
        if not reason:
            return
        if distributed.is_rank0():
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the checkpoint {folder} could not be written ({reason}); earlier ones are whole."
        )

    def _describe_shards(self, partial: Path) -> dict[str, Any]:
        """The files of all ranks, as the manifest lists them. Collective."""
        mine = partial.glob(f"shard-{distributed.rank() + 1:05d}-*")
        parts: list[Any] = [None] * distributed.world_size()
        try:
            described: Any = {file.name: files.describe(file) for file in mine}
        except OSError as error:
            described = error
        dist.all_gather_object(parts, described, group=self._group)
        for part in parts:
            if isinstance(part, OSError):
                raise part
        return {name: part[name] for part in parts for name in part}

    def _finish(self, partial: Path, folder: Path, contents: State) -> str:
        """On rank 0 make a checkpoint of the shards; what went wrong, on every rank. Collective."""
        verdict = [""]
        if distributed.is_rank0():
            try:
                verdict = [self._name(partial, folder, contents)]
            except OSError as error:
                verdict = [cause(error)]
        dist.broadcast_object_list(verdict, src=0, group=self._group)
        return verdict[0]

    def _name(self, partial: Path, folder: Path, contents: State) -> str:
        """Give the shards a manifest and their name; what went wrong."""
        unseen = [name for name in sorted(contents["files"]) if not (partial / name).exists()]
        if unseen:
            return f"{unseen[0]} is not to be seen from rank 0: all hosts need one --output_dir"
        files.write_manifest(partial, contents)
        files.put_in_place(partial, folder)
        best = best_checkpoint.ranking(self.output_dir, self.config.metric_for_best_model)
        try:
            files.remove_old(self.output_dir, self.config.keep_last, best[0] if best else None)
        except OSError as error:
            print(f"warning: old checkpoints could not be removed ({cause(error)}).", flush=True)
        return ""

    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            UserError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> bool:
        """End the writing; with `load_best_model_at_end`, load the best parameters. Collective.

        Returns:
            Whether that was done and they are of another step than the last that was saved.

        Raises:
            UserError: the disk refused.
        """
        self.wait()
        self._end()
        name = self.config.metric_for_best_model
        if not name:
            return False
        for best in distributed.from_rank0(best_checkpoint.ranking(self.output_dir, name)):
            if reason := files.damage(best):
                distributed.print_rank0(f"warning: the checkpoint {best} is skipped: {reason}.")
                continue
            distributed.print_rank0(f"the checkpoint with the best {name} is {best}")
            if not self.config.load_best_model_at_end:
                return False
            restore_state(best, self.model, self.optimizer, self.reference)
            return files.step_of(best) != self._saved_step
        distributed.print_rank0(
            f"warning: --metric_for_best_model {name} was not logged at the step of any whole "
            "checkpoint; the last step is exported."
        )
        return False

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
            folder: from `find`.

        Raises:
            UserError: the checkpoint has a reference and this run updates none, or the reverse; or
                it has other adapters, or does not fit the model; or another run is writing to
                `output_dir`.
        """
        manifest: State = {"step": 0, "lines": {}}
        if folder is not None:
            manifest = restore_state(folder, self.model, self.optimizer, self.reference)
            self._restore_sums(manifest["sums"])
            if folder.parent.resolve() == (self.output_dir / "checkpoints").resolve():
                self._saved_step = manifest["step"]
            else:
                manifest["lines"] = {}
            distributed.print_rank0(f"resuming after step {manifest['step']} from {folder}")
        if distributed.is_rank0():
            output_lock.take(self.output_dir)
            set_aside(self.config)
            # In this order: a checkpoint must not outlive the records of its steps.
            if removed := files.remove_after(self.output_dir, manifest["step"]):
                names = ", ".join(path.name for path in removed)
                print(f"removed checkpoints of {self.output_dir}: {names}", flush=True)
            for name, number in manifest["lines"].items():
                if not keep_lines(self.output_dir / name, number):
                    print(
                        f"warning: {self.output_dir / name} has fewer than the {number} lines that "
                        "it had when the checkpoint was made.",
                        flush=True,
                    )
        distributed.barrier()
        return int(manifest["step"])

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
        who = signals.received() or "a signal to another rank"
        how_to_go_on = self.keep(step)
        self._end()
        raise signals.Stopped(f"stopped after step {step} by {who}; {how_to_go_on}.")

    def keep(self, step: int) -> str:
        """Save the state after `step` steps unless that was done; how to go on. Collective.

        Raises:
            UserError: the disk refuses.
        """
        if self._saved_step != step:
            self._save(step, files.folder_of(self.output_dir, step))
        self.wait()
        return self.how_to_go_on(step)

    def how_to_go_on(self, step: int) -> str:
        """Which command goes on from the checkpoint after `step` steps, "" if there is none."""
        if self._saved_step != step:
            return ""
        is_found = self.config.resume_from_checkpoint in ("auto", "latest")
        how = "" if is_found else " with --resume_from_checkpoint auto"
        return f"the same command{how} goes on from {files.folder_of(self.output_dir, step)}"

    def _is_stop_agreed(self, at_once: bool) -> bool:
        """Whether any rank had got a signal when it was last asked, or now. Collective."""
        if distributed.world_size() == 1:
            return bool(signals.received())
        last = self._vote
        num_signals = torch.tensor(float(bool(signals.received())))
        self._vote = (dist.all_reduce(num_signals, async_op=True), num_signals)
        if at_once and last is not None:
            last[0].wait()  # no collective is let go of before its end
        work, num_signals = (self._vote if at_once else last) or (None, torch.zeros(()))
        if work is not None:
            work.wait()
        return bool(num_signals > 0)


def cause(error: BaseException) -> str:
    """The reason of a failed save in a few words: that of the first rank which has one."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    first: Any = next(iter(failures.values()))[0] if failures else error
    if isinstance(first, OSError) and first.errno is not None:
        return os.strerror(first.errno)
    return gist(first)
