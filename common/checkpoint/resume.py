"""The checkpoint to resume from, and refusals of a folder of another run."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import distributed
from common.checkpoint import layout
from common.config.stages import MODEL_FOLDERS, TrainConfig
from common.errors import UserError
from common.record import output_lock
from common.record.run_folder import (
    ENVIRONMENT,
    inputs_of,
    read_config,
    read_training_config,
)
from common.shutdown import signals

OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_target_modules", "model_name_or_path")
# Of a job, how often it was started again; and the job's id. Jobs inherit the count of the one from
# within which they are submitted
RESTARTS = {
    "TORCHELASTIC_RESTART_COUNT": "TORCHELASTIC_RUN_ID",
    "SLURM_RESTART_COUNT": "SLURM_JOB_ID",
}
# Flags that mean another one where they are empty or 0
FILLED = {"ref_model_name_or_path": "model_name_or_path", "num_candidates": "num_generations"}


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means, None to start at step 0. Collective.

    From now on no other run may write to `output_dir`, or what is found would not hold. It warns of
    a damaged one and takes the one before it. Rank 0 lists the folders for all ranks. Raises
    Stopped if this run is finished already, so that a list of commands can be repeated. A UserError
    if the named folder is no whole checkpoint, or all are damaged; if `output_dir` has a checkpoint
    or a model of another run; or if another run is writing to it.
    """
    wanted, output_dir = config.resume_from_checkpoint, Path(config.output_dir)
    refuse_other_stage(config)
    goes_on = wanted in ("auto", "latest")
    if distributed.from_rank0(distributed.is_rank0() and not lock(config, goes_on=goes_on)):
        raise signals.Stopped(
            f"finished before: {output_dir}/model; --resume_from_checkpoint none trains it again."
        )
    folders: list[Path] = distributed.from_rank0(layout.newest_first(output_dir))
    if not goes_on:
        if is_restart(output_dir) and has_own(folders, config):
            wanted = "auto"  # the command is repeated, and the run has saved since
        elif wanted in ("", "none"):
            return None
        else:
            return named(Path(wanted), config, folders)
    for folder in folders:
        if not (reason := layout.damage(folder)):
            refuse_other_run(folder, config, any_config=wanted == "latest")
            warn_of_changed_inputs(config)
            return folder
        distributed.print_rank0(f"warning: the checkpoint {folder} is skipped: {reason}.")
    if folders:
        raise UserError(
            f"no checkpoint in {output_dir} is whole; --resume_from_checkpoint none starts anew."
        )
    if distributed.is_rank0() and (changes := other_model(config)):
        raise UserError(
            f"{output_dir / 'model'} is of another run: {'; '.join(changes)}; "
            "give the same values to make it again, another --output_dir, or "
            "--resume_from_checkpoint none to replace it."
        )
    return None


def lock(config: TrainConfig, *, goes_on: bool) -> bool:
    """Lock `output_dir`; False if a run that goes on is finished there already. Rank 0 only."""
    if goes_on and is_trained(config):
        return False
    output_lock.take(Path(config.output_dir))
    if not goes_on or not has_finished(config):
        return True
    changed = changed_inputs(config)  # none: another run of the same command has ended meanwhile
    if changed:
        print(f"{config.output_dir}/model is trained again: {changed[0]} has changed", flush=True)
    return bool(changed)


def is_restart(output_dir: Path) -> bool:
    """Whether this job was started again, and was the last to write `output_dir`. Collective."""
    last = read_config(output_dir, ENVIRONMENT).get("job", {})
    is_again = any(
        distributed.number_in(count) and last.get(name) == distributed.environment(name)
        for count, name in RESTARTS.items()
    )
    return bool(distributed.from_rank0(is_again))


def refuse_other_stage(config: TrainConfig) -> None:
    """Raise a UserError on rank 0 if the run would replace a model of another stage, or of none.

    Or records of another tool, which gave its files the same names.
    """
    if not distributed.is_rank0():
        return
    output_dir, stage = Path(config.output_dir), type(config).__name__
    written_by = read_config(output_dir, ENVIRONMENT).get("stage", "no run")
    replaced = ["folder 'model'"] if has_model(output_dir) and written_by != stage else []
    if not read_training_config(output_dir) and not layout.newest_first(output_dir):
        replaced += [f"file {name!r}" for name in layout.RECORDS if (output_dir / name).is_file()]
    if replaced:
        raise UserError(
            f"--output_dir {output_dir} has a {replaced[0]} of {written_by}, and this run of "
            f"{stage} would replace it; name another folder."
        )


def has_model(output_dir: Path) -> bool:
    """Whether `output_dir` has a finished model; an empty folder is none."""
    return (output_dir / "model").is_dir() and any((output_dir / "model").iterdir())


def is_trained(config: TrainConfig) -> bool:
    """Whether a run of the same config finished here, and what it read has not changed since."""
    return has_finished(config) and not changed_inputs(config)


def has_finished(config: TrainConfig) -> bool:
    """Whether a run of the same config finished here."""
    output_dir = Path(config.output_dir)
    is_marked = read_config(output_dir, ENVIRONMENT).get("finished")
    return bool(has_model(output_dir) and is_marked and not other_model(config))


def changed_inputs(config: TrainConfig) -> list[str]:
    """The inputs that have changed since this run was last started."""
    now = inputs_of(config)
    before = read_config(Path(config.output_dir), ENVIRONMENT).get("inputs", now)
    return [name for name in now if before.get(name, now[name]) != now[name]]


def warn_of_changed_inputs(config: TrainConfig) -> None:
    """Name what a resumed run reads otherwise than before, on rank 0."""
    for name in changed_inputs(config) if distributed.is_rank0() else ():
        print(f"warning: {name} has changed: the run goes on with the new one", flush=True)


def other_model(config: TrainConfig) -> list[str]:
    """Differences between the run of a finished model in `output_dir` and this one."""
    output_dir = Path(config.output_dir)
    if not has_model(output_dir):
        return []
    stage = read_config(output_dir, ENVIRONMENT).get("stage", "no run")
    return differences(stage, read_config(output_dir), config)


def set_aside_other_model(config: TrainConfig) -> None:
    """Rename a finished model of another config, so that it is not taken for this run's."""
    if not other_model(config):
        return
    for name in MODEL_FOLDERS:
        place = (Path(config.output_dir) / name).resolve()
        if place.is_dir():
            before = place.with_name(f"{place.name}.before")
            layout.discard(before)  # of a still earlier run
            place.rename(before)
            print(f"the {name} of another run is in {before} now", flush=True)


def has_own(folders: Sequence[Path], config: TrainConfig) -> bool:
    """Whether any of the checkpoints is of a run of this stage with this config. Collective."""
    is_own = False
    for folder in folders:
        with contextlib.suppress(ValueError, KeyError):  # damaged, or written by another version
            is_own = is_own or not other_run(folder, config)
    return bool(distributed.from_rank0(is_own))


def named(folder: Path, config: TrainConfig, others: Sequence[Path]) -> Path:
    """The folder of `--resume_from_checkpoint`, checked. Collective.

    A UserError if it is damaged or of another stage, or `output_dir` has checkpoints of another
    run, which those of this one would mix with.
    """
    if reason := layout.damage(folder):
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
    """Raise a UserError if a checkpoint is of another stage, or of another config."""
    if differences := other_run(folder, config, any_config=any_config):
        raise UserError(
            f"{folder} is of another run: {'; '.join(differences)}; give the same values to go on "
            "with it, another --output_dir, --resume_from_checkpoint latest to go on with the new "
            "values, or none to start anew."
        )


def other_run(folder: Path, config: TrainConfig, *, any_config: bool = False) -> list[str]:
    """Differences between a checkpoint's run and this one: the stage, or else the config.

    With `any_config` only those by which the weights in it are others than this run's.
    """
    manifest = layout.read_manifest(folder)
    saved = manifest["config"]
    if any_config:
        names = OF_ADAPTERS if saved.get("lora_r") or config.lora_r else ()
        if bool(saved.get("ref_update_steps")) != bool(config.ref_update_steps):
            names = (*names, "ref_update_steps")
        saved = dataclasses.asdict(config) | {name: saved.get(name) for name in names}
    return differences(manifest["stage"], saved, config)


def differences(stage: str, saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """The stage if it was another, else `changed_fields` of a saved config, if there is one."""
    if stage != type(config).__name__:
        return [f"the stage was {stage} and is {type(config).__name__}"]
    return changed_fields(saved, config) if saved else []


def changed_fields(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Differences to a saved config that make it another run: "seed was 0 and is 1".

    A field added since counts as its default in the saved config. A removed field that was on, as
    `dropout: 0.1`, counts as a difference.
    """
    fields = {f.name: f for f in dataclasses.fields(config)}
    gone = [name for name, before in saved.items() if before and name not in fields]
    differences = [f"{name} was {saved[name]!r} and is no flag any more" for name in gone]
    for name, f in fields.items():
        before, now = saved.get(name, f.metadata["default"]), getattr(config, name)
        if name in FILLED and (before or now):  # older runs saved what it means
            default = fields[FILLED[name]].metadata["default"]
            before = before or saved.get(FILLED[name], default)
            now = now or getattr(config, FILLED[name])
        if not f.metadata["may_change"] and before != now:
            differences.append(f"{name} was {before!r} and is {now!r}")
    return differences
