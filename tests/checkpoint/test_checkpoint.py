"""Checkpoints are whole or not taken for whole, and a stopped run loses nothing.

About `common.checkpoint` and `common.record.output_lock`.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from ranks import ROOT, launch
from torch import nn

from common import distributed
from common.checkpoint import checkpointer as checkpoint
from common.checkpoint import layout, resume
from common.checkpoint.checkpointer import Checkpointer
from common.distributed import mesh
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp, optim
from common.record import output_lock
from common.record.environment import save_run_files
from common.record.jsonl import json_line, read_jsonl
from common.shutdown import signals

pytestmark = pytest.mark.usefixtures("process_group")
SHARD = "shard-00001-model-00001-of-00001.safetensors"
Trained = tuple[nn.Module, torch.optim.Optimizer]


def trained(seed: int = 0, steps: int = 1) -> Trained:
    """A policy that made some steps."""
    config = tiny.train_config()
    policy = fsdp.shard(Policy(tiny.causal_lm("gpt2", seed=seed)), config, mesh())
    optimizer = optim.build_optimizer(policy, config)
    for _ in range(steps):
        make_step(policy, optimizer)
    return policy, optimizer


def make_step(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(p.square().sum() for p in policy.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(run: Trained) -> list[torch.Tensor]:
    """Every number of a run: parameters and moments."""
    policy, optimizer = run
    moments = [value for values in optimizer.state.values() for value in values.values()]
    return [value.detach().clone() for value in (*policy.parameters(), *moments)]


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def find(output_dir: Path, wanted: str = "auto", **fields: Any) -> Path | None:
    fields = {"output_dir": str(output_dir), "resume_from_checkpoint": wanted, **fields}
    return resume.find_checkpoint(tiny.train_config(**fields))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The output folder of a run with checkpoints after steps 1, 2 and 3."""
    run = trained()
    saver = tiny.checkpointer(tmp_path, *run)
    for step in (1, 2, 3):
        saver.save(step)
        make_step(*run)
    saver.close()
    return tmp_path


@pytest.fixture
def asked() -> Iterator[None]:
    """As if this process had got SIGTERM."""
    signals._first = (signal.SIGTERM, 0.0)
    yield
    signals._first = None


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    run = trained()
    saver, expected = tiny.checkpointer(tmp_path, *run), state(run)
    saver.save(7)
    for _ in range(3):
        make_step(*run)
    saver.wait()
    assert not are_equal(state(run), expected)
    other = trained(seed=1, steps=0)
    assert tiny.checkpointer(tmp_path, *other).load(find(tmp_path)) == 7
    assert are_equal(state(other), expected)


def test_a_run_that_made_no_step_is_saved_as_new(tmp_path: Path) -> None:
    """Torch makes a step to have a state to save; it must not count."""
    run, other = trained(steps=0), trained(seed=1, steps=0)
    saver = tiny.checkpointer(tmp_path, *run)
    saver.save(0)
    saver.close()
    tiny.checkpointer(tmp_path, *other).load(find(tmp_path))
    fresh = trained(steps=0)
    for each in (other, fresh):
        make_step(*each)
    assert are_equal(state(other), state(fresh))


def test_nothing_is_pickled(saved: Path) -> None:
    for folder in layout.newest_first(saved):
        assert {path.name for path in folder.iterdir()} == {SHARD, "manifest.json"}


# ---- damage --------------------------------------------------------------------------------------


def flip(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / SHARD).write_bytes(content)


def of_step_2(folder: Path, name: str) -> Path:
    return folder.with_name("step_00000002") / name


DAMAGE: list[tuple[Any, str]] = [
    (lambda folder: os.truncate(folder / SHARD, 1000), f"{SHARD} does not have its"),
    (flip, f"{SHARD} does not have its checksum"),
    (lambda folder: (folder / SHARD).unlink(), f"{SHARD} cannot be read"),
    (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    (lambda folder: os.truncate(folder / "manifest.json", 99), "it has no manifest.json"),
    (lambda folder: (folder / "manifest.json").write_text("{}"), "it has no manifest.json"),
    (lambda folder: (folder / "manifest.json").write_text("[1]"), "it has no manifest.json"),
    (
        lambda folder: shutil.copy(of_step_2(folder, "manifest.json"), folder),
        "its manifest.json is of step 2",
    ),
    (  # torch would read it, and the older numbers in it
        lambda folder: shutil.copy(of_step_2(folder, SHARD), folder / "copy.safetensors"),
        "copy.safetensors does not belong to it",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_damage_is_named_and_the_one_before_is_taken(saved, damage, reason, capsys):
    newest, before, _ = layout.newest_first(saved)
    assert find(saved) == newest
    damage(newest)
    for wanted in ("auto", "latest"):
        assert find(saved, wanted) == before
        assert f"{newest} is skipped: {reason}" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"no whole checkpoint: {reason}"):
        find(saved, str(newest))


def test_if_all_are_damaged_the_run_does_not_start_anew(saved: Path) -> None:
    for folder in layout.newest_first(saved):
        flip(folder)
    with pytest.raises(UserError, match="no checkpoint in .* is whole; .* none starts anew"):
        find(saved)
    assert find(saved, "none") is None


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(saved, monkeypatch):
    monkeypatch.setattr(layout.os, "listdir", mock.Mock(side_effect=PermissionError))
    for wanted in ("auto", "latest", "none"):
        with pytest.raises(PermissionError):
            find(saved, wanted)


def test_what_was_being_written_is_none_and_is_removed(saved: Path) -> None:
    newest, before, oldest = layout.newest_first(saved)
    newest.rename(newest.with_name(newest.name + ".partial"))
    assert find(saved) == before
    tiny.checkpointer(saved, *trained()).load(before)
    assert sorted((saved / "checkpoints").iterdir()) == [oldest, before]


def test_what_is_no_folder_among_checkpoints_is_removed_and_what_a_link_points_to_is_not(
    saved: Path, tmp_path: Path
) -> None:
    newest, before, oldest = layout.newest_first(saved)
    elsewhere = newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(elsewhere)
    checkpoints = saved / "checkpoints"
    (checkpoints / "step_00000007.partial").symlink_to("gone")
    (checkpoints / "step_00000008.partial").write_text("")
    (checkpoints / "step_00000001.old.partial").symlink_to(elsewhere)  # a removal that broke off
    saver = tiny.checkpointer(saved, *trained())
    assert saver.load(find(saved)) == 3  # the link is a checkpoint as any other
    assert sorted(checkpoints.iterdir()) == [oldest, before, newest]
    saver.load(before)
    assert sorted(checkpoints.iterdir()) == [oldest, before]
    assert layout.damage(elsewhere) == ""
    newest.symlink_to("gone")
    saver.save(3)
    saver.close()
    assert find(saved) == newest


# ---- which run it is of --------------------------------------------------------------------------


def test_auto_refuses_another_config_and_names_the_fields(saved: Path) -> None:
    with pytest.raises(UserError) as caught:
        find(saved, seed=5, learning_rate=2e-5)
    assert "seed was 0 and is 5; learning_rate was 1e-05 and is 2e-05" in str(caught.value)
    assert find(saved, "latest", seed=5) is not None
    for wanted in ("latest", str(layout.folder_of(saved, 3))):  # its weights have other names
        with pytest.raises(UserError, match="of another run: lora_r was 0 and is 4;"):
            find(saved, wanted, lora_r=4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stage": "DPOConfig"}, "the stage was DPOConfig and is SFTConfig"),
        (
            {"config": {"dropout": 0.1, "was_off": False}},
            "dropout was 0.1 and is no flag any more;",
        ),
    ],
)
def test_auto_refuses_another_stage_and_a_flag_that_was_on_and_is_gone(change, reason, saved):
    newest = layout.newest_first(saved)[0]
    contents = layout.read_manifest(newest)
    contents |= change | {"config": contents["config"] | change.get("config", {})}
    (newest / "manifest.json").write_text(json.dumps(contents))
    with pytest.raises(UserError, match=f"of another run: {reason}"):
        find(saved)


def test_auto_goes_on_where_only_the_way_of_computing_differs(saved: Path) -> None:
    fields = {"micro_batch_tokens": 99, "layout": "padded", "save_steps": 5, "logging_steps": 5}
    assert find(saved, **fields) == layout.folder_of(saved, 3)


def test_a_checkpoint_of_elsewhere_is_not_mixed_with_others(saved: Path, tmp_path: Path) -> None:
    first = layout.folder_of(saved, 1)
    assert find(tmp_path / "new", str(first)) == first
    tiny.checkpointer(tmp_path / "used", *trained(), async_save=False).save(1)
    with pytest.raises(UserError, match="has checkpoints of its own, .* name a new --output_dir"):
        find(tmp_path / "used", str(first))


@pytest.mark.parametrize("variable", resume.RESTARTS)
def test_a_restart_goes_on_with_its_own_run_whatever_the_flag_says(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    newest, _, oldest = layout.newest_first(saved)
    for wanted in ("none", str(oldest)):
        assert find(saved, wanted) == newest
    # Checkpoints that the first start refused, or had no time to remove, are of another run.
    assert find(saved, "none", seed=5) is None
    tiny.checkpointer(tmp_path / "elsewhere", *trained(), async_save=False).save(1)
    first = layout.folder_of(tmp_path / "elsewhere", 1)
    with pytest.raises(UserError, match="has checkpoints of its own"):
        find(saved, str(first), seed=5)


@pytest.mark.parametrize("count", resume.RESTARTS)
@pytest.mark.parametrize("writer", ["this job", "another job", None])
def test_a_restart_counts_only_where_this_job_wrote_last(
    saved: Path, monkeypatch: pytest.MonkeyPatch, count: str, writer: str | None
) -> None:
    """A job that is submitted from within a requeued one inherits its count, not its id."""
    for variable in (*resume.RESTARTS, *resume.RESTARTS.values()):
        monkeypatch.delenv(variable, raising=False)
    job_id = resume.RESTARTS[count]
    if writer:
        monkeypatch.setenv(job_id, writer)
    save_run_files(saved, tiny.train_config(output_dir=str(saved)), 1)
    monkeypatch.setenv(job_id, "this job")
    monkeypatch.setenv(count, "2")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")  # is inherited as well
    newest, _, oldest = layout.newest_first(saved)
    is_again = writer == "this job"
    assert find(saved, "none") == (newest if is_again else None)
    assert find(saved, str(oldest)) == (newest if is_again else oldest)
    assert find(saved) == newest


def test_a_model_of_another_stage_is_not_replaced(saved: Path) -> None:
    (saved / "model").mkdir()
    assert find(saved) is not None  # as on a disk that a link leads to: nothing is lost
    (saved / "model" / "config.json").touch()
    shutil.rmtree(saved / "checkpoints")
    with pytest.raises(UserError, match="a folder 'model' of no run, and this run of SFTConfig"):
        find(saved)
    (saved / "environment.json").write_text('{"stage": "DPOConfig", "finished": true}')
    for wanted in ("auto", "none"):
        with pytest.raises(UserError, match="'model' of DPOConfig, and this run of SFTConfig wou"):
            find(saved, wanted)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_records_of_another_tool_are_not_cut(tmp_path, name):
    for stray in ("config.yaml", "environment.json"):
        (tmp_path / stray).write_text("learning_rate: 1")  # the second is no JSON
    assert find(tmp_path) is None
    tiny.write_rows(tmp_path / name, [{"loss": 1.0}])
    for wanted in ("auto", "none"):
        with pytest.raises(UserError, match=f"a file '{name}' of no run, and this run of SFTConf"):
            find(tmp_path, wanted)
    tiny.write_run_config(tmp_path)
    assert find(tmp_path) is None  # of a run that was killed early


def test_a_finished_model_without_checkpoints_is_not_replaced_by_another_run(tmp_path):
    save_run_files(tmp_path, tiny.train_config(output_dir=str(tmp_path)), 1)
    assert find(tmp_path, seed=5) is None  # it was killed early: there is nothing to lose
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert find(tmp_path, logging_steps=3) is None
    for wanted in ("auto", "latest"):
        with pytest.raises(UserError, match="model is of another run: seed was 0 and is 5; give"):
            find(tmp_path, wanted, seed=5)
    assert find(tmp_path, "none", seed=5) is None
    same, other = (tiny.checkpointer(tmp_path, *trained(), seed=seed) for seed in (0, 5))
    same.load(None)
    assert (tmp_path / "model" / "config.json").exists()
    output_lock.release(tmp_path)
    other.load(None)  # killed early, it would leave another run's model next to its config
    assert not (tmp_path / "model").exists()
    assert (tmp_path / "model.before" / "config.json").exists()


def test_a_run_does_not_replace_what_it_reads(tmp_path: Path) -> None:
    for path in ("model/part", "checkpoints/step_00000001"):
        (tmp_path / "run" / path).mkdir(parents=True)
    for path in ("model", "model/part", "../run/model", "checkpoints/step_00000001"):
        with pytest.raises(UserError, match="--model_name_or_path is .*, which this run would"):
            tiny.train_config(
                output_dir=str(tmp_path / "run"), model_name_or_path=str(tmp_path / "run" / path)
            )


def test_a_checkpoint_of_another_shape_is_refused(saved: Path) -> None:
    policy = fsdp.shard(Policy(tiny.causal_lm("gpt2", width=64)), tiny.train_config(), mesh())
    run = policy, optim.build_optimizer(policy, tiny.train_config())
    with pytest.raises(UserError, match="step_00000003 does not fit the model: "):
        tiny.checkpointer(saved, *run).load(find(saved))


# ---- two runs in a folder ------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from common.record import output_lock
output_lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
TAKE = HOLD.replace("time.sleep(60)", "")


def test_a_folder_is_another_run_s_until_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        for wanted in ("auto", "none"):  # a checkpoint may come later, while this one loads
            config = tiny.train_config(output_dir=str(tmp_path), resume_from_checkpoint=wanted)
            with pytest.raises(UserError, match="is being written by another run; wait"):
                resume.find_checkpoint(config)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    output_lock.take(tmp_path)
    output_lock.take(tmp_path)  # a run in the same process goes on
    again = [sys.executable, "-c", TAKE, str(tmp_path)]
    assert "UserError" in subprocess.run(again, cwd=ROOT, capture_output=True, text=True).stderr
    output_lock.release(tmp_path)
    subprocess.run(again, cwd=ROOT, check=True)


def test_what_a_run_finds_to_resume_holds_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "new/run"
    assert resume.find_checkpoint(tiny.train_config(output_dir=str(folder))) is None
    again = [sys.executable, "-c", TAKE, str(folder)]
    assert "UserError" in subprocess.run(again, cwd=ROOT, capture_output=True, text=True).stderr
    output_lock.release(folder)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ([], ["old"]),
        (["old/a/mine"], ["old", "old/a", "old/a/mine"]),
        (["old/a/b/metrics.jsonl"], ["old", "old/a", "old/a/b", *2 * ["old/a/b/"]]),
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path: Path, files: list[str], left: list[str]) -> None:
    (tmp_path / "old").mkdir()
    output_lock.take(tmp_path / "old/a/b")
    for name in files:
        (tmp_path / name).write_text("")
    output_lock.give_up()
    there = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert len(there) == len(left)
    assert all(path.startswith(name) for path, name in zip(there, left, strict=True))
    output_lock.release(tmp_path / "old/a/b")


# ---- which are kept ------------------------------------------------------------------------------


def save_all(output_dir: Path, losses: list[float], **fields: Any) -> Checkpointer:
    """Save after each step, with an eval_loss logged before."""
    saver = tiny.checkpointer(output_dir, *trained(), save_steps=1, eval_steps=1, **fields)
    for step, loss in enumerate(losses, start=1):
        with (output_dir / "metrics.jsonl").open("a") as file:
            file.write(json_line({"step": step, "eval_loss": loss, "eval_accuracy": loss}))
        saver.save(step)
        make_step(saver.model, saver.optimizer)
    return saver


def steps_in(output_dir: Path) -> list[int]:
    return [layout.step_of(path) for path in layout.newest_first(output_dir)]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save_all(tmp_path, [1.0] * 5, keep_last=2).close()
    assert steps_in(tmp_path) == [5, 4]
    save_all(tmp_path, [1.0] * 5, keep_last=0).close()
    assert steps_in(tmp_path) == [5, 4, 3, 2, 1]


def test_what_is_removed_has_no_checkpoints_name(tmp_path, monkeypatch):
    save_all(tmp_path, [0.9, 0.2, 0.5], keep_last=0).close()
    removed: list[str] = []
    monkeypatch.setattr(layout.shutil, "rmtree", lambda x, **_: removed.append(x.name))
    layout.remove_old(tmp_path, 1)
    assert steps_in(tmp_path) == [3]
    assert all(name.endswith(".partial") for name in removed)


def test_records_are_cut_where_they_were_when_the_checkpoint_was_made(tmp_path: Path) -> None:
    """A line of the same step that was logged after the checkpoint is logged again."""
    save_all(tmp_path, [0.9, 0.8]).close()
    path = tmp_path / "metrics.jsonl"
    expected = path.read_text()
    torn = '{"step": 40, "loss": "é'.encode()[:-1]  # killed inside a character
    path.write_bytes((expected + json_line({"step": 2, "reward_shift": 1.0})).encode() + torn)
    tiny.checkpointer(tmp_path, *trained()).load(layout.folder_of(tmp_path, 2))
    assert path.read_text() == expected
    tiny.checkpointer(tmp_path, *trained()).load(layout.folder_of(tmp_path, 1))
    assert [line["step"] for line in read_jsonl(path)] == [1]
    assert tiny.checkpointer(tmp_path, *trained()).load(None) == 0  # a new run has none
    assert path.read_text() == ""
    assert layout.newest_first(tmp_path) == []  # and no checkpoint


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_was_summed_up_for_the_next_line_goes_on(tmp_path: Path, num_ranks: int) -> None:
    saver = tiny.checkpointer(tmp_path, *trained())
    third = 1 / 3
    saver.metrics.add("loss", third, 3)
    saver.save(1)
    saver.close()
    manifest = layout.read_manifest(layout.folder_of(tmp_path, 1))
    assert manifest["sums"] == [{"loss": [third, 3.0]}]
    other = tiny.checkpointer(tmp_path, *trained())
    other._restore_sums(manifest["sums"] * num_ranks)  # as if so many ranks had saved
    other.metrics.add_values(grad_norm=6.0)
    assert other.metrics.reduce() == {"loss": third * num_ranks / (3 * num_ranks), "grad_norm": 6.0}


# ---- a disk that refuses -------------------------------------------------------------------------


def test_an_error_of_writing_ends_the_run_and_leaves_the_last_one(saved, monkeypatch):
    saver = tiny.checkpointer(saved, *trained())
    monkeypatch.setattr(checkpoint, "save_shards", mock.Mock(side_effect=OSError(errno.ENOSPC, "")))
    saver.save(4)
    with pytest.raises(UserError, match="step_00000004 could not be written .No space left on"):
        saver.wait()
    monkeypatch.undo()
    assert find(saved) == layout.folder_of(saved, 3)
    assert not list((saved / "checkpoints").glob("*.partial"))


def test_a_full_disk(tmp_path: Path) -> None:
    run = trained()
    size = sum(p.numel() * 4 * 3 for p in run[0].parameters())
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size * 5 // 2}", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small file system can be mounted by root only")
    try:
        saver = tiny.checkpointer(disk, *run, async_save=False)
        saver.save(1)
        saver.save(2)
        with pytest.raises(UserError, match="No space left on device"):
            saver.save(3)
        newest = find(disk)
        assert newest is not None
        other = trained(seed=1, steps=0)
        assert tiny.checkpointer(disk, *other).load(newest) == layout.step_of(newest)
        assert are_equal(state(other), state(run))
    finally:
        output_lock.release(disk)
        subprocess.run(["umount", str(disk)], check=True)


# ---- signals -------------------------------------------------------------------------------------


def test_a_stopped_run_is_that_of_the_last_finished_step(tmp_path: Path, asked: None) -> None:
    run = trained()
    expected = state(run)
    saver = tiny.checkpointer(tmp_path, *run)
    saver.metrics.add("loss", 1.0)
    signals._first = None
    saver.stop_if_asked(5)
    assert layout.newest_first(tmp_path) == []  # it was not asked
    saver.metrics.add("loss", 100.0)  # of the step that is not finished
    next(run[0].parameters()).sum().backward()
    signals._first = (signal.SIGTERM, 0.0)
    with pytest.raises(signals.Stopped, match="after step 5 by SIGTERM; the same command goes on"):
        saver.stop_if_asked(5)
    folder = find(tmp_path)
    assert folder == layout.folder_of(tmp_path, 5)
    assert layout.read_manifest(folder)["sums"] == [{"loss": [1.0, 1.0]}]
    other = trained(seed=1, steps=0)
    tiny.checkpointer(tmp_path, *other).load(folder)
    assert are_equal(state(other), expected)


def stop_all(into: str) -> list[Any]:
    """The exit status and the message of this rank after a signal to rank 1."""
    if distributed.rank() == 1:
        signals._first = (signal.SIGTERM, 0.0)
    with pytest.raises(signals.Stopped) as caught:
        tiny.checkpointer(Path(into), *trained()).stop_if_asked(5, at_once=True)
    return [caught.value.status, str(caught.value)]


def test_all_ranks_end_by_the_signal_of_one(tmp_path: Path) -> None:
    (status, text), second = launch(stop_all, 2, tmp_path, into=str(tmp_path))
    assert second == [status, text]
    assert (status, text[:32]) == (143, "stopped after step 5 by SIGTERM;")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are named in /proc")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_of_saving_is_left(tmp_path: Path, is_stopped: bool, asked: None) -> None:
    """Neither the thread nor the process group, with which threads of gloo end."""

    def groups() -> set[str]:
        """Threads of gloo, by their ids: those of earlier tests may end meanwhile."""
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                found |= {task.name} if (task / "comm").read_text().startswith("gloo") else set()
        return found

    before = groups()
    saver = tiny.checkpointer(tmp_path, *trained())
    saver.save(1)
    assert len(groups() - before) == 1
    if is_stopped:
        with pytest.raises(signals.Stopped):
            saver.stop_if_asked(1)
    else:
        saver.close()
    deadline = time.monotonic() + 30  # the last reference is dropped by a thread of the group
    while groups() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert groups() - before == set()
    assert not any(thread.is_alive() for thread in saver._thread._threads)


def test_signals_stop_a_run_unless_nohup_has_said_no_and_a_second_one_ends_it() -> None:
    """Within a second the second one is the launcher passing on the first."""
    program = """
import os, signal, time
from common.shutdown import signals
for handler, name in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "")):
    signal.signal(signal.SIGHUP, handler)
    signals.listen(speaks=False)
    os.kill(os.getpid(), signal.SIGHUP)
    while signals.received() != name:
        time.sleep(0.01)
signals.listen()
os.kill(os.getpid(), signal.SIGUSR1)  # which came after it
os.kill(os.getpid(), signal.SIGUSR1)
while not signals.received():
    time.sleep(0.01)
assert signals.received() == "SIGUSR1"
signals.SAME_SIGNAL = 0.0
time.sleep(0.1)
print("still here", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("and here")
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, "still here\n")
    assert result.stderr == "\nSIGUSR1: saving and ending soon; a second one ends at once\n"
