"""A resumed run is the run that never stopped, to the bit.

Every stage makes 6 steps with a checkpoint after the third, once in one go, once resumed in new
processes from what a run killed in its sixth step leaves behind. The long form, with kills at
random moments, is `python -m tests.fault_drill`. About `common.checkpoint.resume`.
"""

import random
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fault_drill
import pytest
import tiny
from ranks import ROOT, SHORT_RUN, Script, launch, run_stages, untimed_lines
from safetensors.torch import load_file

import train_sft
from common import distributed
from common.checkpoint import hf_folder, layout, resume
from common.checkpoint.resume import changed_fields
from common.config.grpo import GRPOConfig
from common.errors import UserError
from common.evaluation import runs
from common.forward import Policy
from common.model import fsdp, load, optim
from common.record import environment, output_lock
from common.record import run_folder as folder_module
from common.record.jsonl import read_jsonl
from common.record.logger import RunLogger
from common.report import plots
from common.shutdown import signals
from experiments.runs.stages import config_class
from train_sft import SFTConfig

STEPS, SAVED = 6, 3
MOVES = [(1, 2, "sft"), (2, 1, "grpo"), (2, 4, "grpo")]
RUNS = [(1, "sft"), (1, "reward"), (1, "dpo"), (1, "grpo"), (2, "sft"), (2, "grpo")]
RUNS += [(1, "grpo bf16")]

COMMON = SHORT_RUN | {
    "num_train_rows": 27,  # 4 steps an epoch, the last one short: the checkpoint is amid the first
    "num_eval_rows": 5,
    "num_sample_prompts": 2,
    "max_completion_length": 16,
    "batch_size": 8,
    "micro_batch_size": 3,
    "weight_decay": 0.1,
    "warmup_steps": 2,  # and then a cosine to the last step
    "max_steps": STEPS,
    "eval_steps": 2,
    "sample_steps": 2,
    "save_steps": SAVED,
}
GRPO = {
    "eval_pairs_dataset_name": "synthetic",
    "num_candidates": 4,
    "num_generations": 3,
    "reward_funcs": "gold",
    "missing_eos_penalty": -0.2,
}
OWN: dict[str, dict[str, Any]] = {"grpo": GRPO}
OWN["grpo bf16"] = GRPO | {"bf16": True, "beta": 0.1, "ref_update_steps": 2}


def flags(task: str, base: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A stage's flags, starting from the model of the run in `base`."""
    paths = {"model_name_or_path": str(base / "model"), "output_dir": str(output_dir)}
    return COMMON | OWN.get(task, {}) | paths | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start_flags: dict[str, str]) -> Path:
    """Holds `<ranks>/<task>/whole` and `resumed`, and the runs that change something as well."""
    folder = tmp_path_factory.mktemp("resume")
    base = folder / "base"
    new_model = start_flags | {"learning_rate": 3e-3, "max_steps": 20, "save_steps": 0}
    first = {1: [{"stage": "sft", "flags": flags("sft", base, base, **new_model)}], 2: []}
    second: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
    for num_ranks, task in RUNS:
        whole = folder / str(num_ranks) / task / "whole"
        first[num_ranks].append({"stage": task.split()[0], "flags": flags(task, base, whole)})
        again = flags(task, base, whole.with_name("resumed"))  # the same command finds it
        second[num_ranks].append({"stage": task.split()[0], "flags": again})
    for saved_on, num_ranks, task in [(1, 1, "sft"), *MOVES]:
        whole = folder / str(saved_on) / task / "whole"
        saved = str(layout.folder_of(whole, SAVED))
        named = flags(task, base, moved(folder, saved_on, num_ranks, task))
        job = {"stage": task, "flags": named | {"resume_from_checkpoint": saved}}
        second[num_ranks].append(job)

    for jobs in (first, second):
        for num_ranks in jobs:
            launch(run_stages, num_ranks, folder, jobs=jobs[num_ranks])
        if jobs is first:
            for num_ranks, task in RUNS:
                kill_in_the_last_step(folder / str(num_ranks) / task)
    return folder


def moved(folder: Path, saved_on: int, num_ranks: int, task: str) -> Path:
    """The run that goes on with a checkpoint on another number of ranks."""
    return folder / f"{task}_from_{saved_on}_on_{num_ranks}"


def kill_in_the_last_step(run: Path) -> None:
    """Make `resumed` of `whole`: what it would have left, had it been killed in its last step."""
    whole, resumed = run / "whole", run / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "model")
    last = layout.folder_of(resumed, STEPS)
    last.rename(last.with_name(last.name + ".partial"))  # killed while it was being written
    layout.folder_of(resumed, STEPS - 1).mkdir()  # of a copy that broke off
    kept = [line for line in read_jsonl(whole / "metrics.jsonl") if line["step"] < STEPS]
    for line in kept:
        if line["step"] > SAVED:
            line["loss"] = 1e9  # a line that the resumed run has to make again
    with tiny.write_rows(resumed / "metrics.jsonl", kept).open("a") as file:
        file.write('{"step": 6, "lo')


def difference(run: Path, other: Path) -> float:
    a, b = (load_file(path / "model" / "model.safetensors") for path in (run, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a.keys() & b.keys())


@pytest.mark.parametrize(("num_ranks", "task"), RUNS)
def test_metrics_samples_and_weights_are_identical(folder: Path, num_ranks: int, task: str) -> None:
    runs = [folder / str(num_ranks) / task / name for name in ("whole", "resumed")]
    lines, resumed = map(untimed_lines, runs)
    assert resumed == lines
    assert [line["step"] for line in lines if "grad_norm" in line] == list(range(1, STEPS + 1))
    losses = [line for line in lines if "loss" in line]
    assert all(line["grad_norm"] > 1e-3 for line in losses)  # each step changes the model
    assert len({line["learning_rate"] for line in losses[2:]}) == STEPS - 2
    samples, resumed = (read_jsonl(run / "samples.jsonl") for run in runs)
    assert resumed == samples
    assert {row["step"] for row in samples} == {2, 4, 6}
    weights, resumed = ((run / "model" / "model.safetensors").read_bytes() for run in runs)
    assert resumed == weights
    assert difference(runs[0], folder / "base") > 1e-3


@pytest.mark.parametrize(("num_ranks", "task"), RUNS)
def test_an_exported_checkpoint_is_the_run_s_own_model(folder, num_ranks, task, tmp_path):
    """By this one process, from nothing but the checkpoint: the run may be gone.

    The first one by the command itself, the others on forks that have imported already.
    """
    run = folder / str(num_ranks) / task / "whole"
    moved = shutil.copytree(layout.folder_of(run, STEPS), tmp_path / "saved")
    if (num_ranks, task) == RUNS[0]:
        command = [sys.executable, "-m", "common.checkpoint.export", str(moved)]
        subprocess.run(command, cwd=ROOT, check=True)
    else:
        script = ROOT / "common" / "checkpoint" / "export.py"
        assert Script([script, moved], tmp_path / "log").wait(100) == 0
    assert hf_folder.read_settings(moved / "model") == hf_folder.read_settings(run / "model")
    assert folder_module.read_config(moved) == folder_module.read_config(run)
    assert runs.reward_of_run(str(moved / "model")) == runs.reward_of_run(str(run / "model"))


@pytest.mark.parametrize(("saved_on", "num_ranks", "task"), [(1, 1, "sft"), *MOVES])
def test_a_named_checkpoint_goes_on_in_another_folder(folder, saved_on, num_ranks, task):
    """To the bit, or up to rounding on another number of ranks."""
    whole, elsewhere = folder / f"{saved_on}/{task}/whole", moved(folder, saved_on, num_ranks, task)
    after = [line for line in untimed_lines(whole) if line["step"] > SAVED]
    if num_ranks == saved_on:
        assert untimed_lines(elsewhere) == after
        files = [run / "model" / "model.safetensors" for run in (whole, elsewhere)]
        assert files[0].read_bytes() == files[1].read_bytes()
    for line, expected in zip(untimed_lines(elsewhere), after, strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_config_of_the_run_wins_over_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """An optimiser's state holds betas and weight decay too; this run's config sets them."""
    distributed.start()
    path, saved = str(folder / "1" / "sft" / "whole" / "model"), folder / "1" / "sft" / "whole"
    config = tiny.train_config(weight_decay=0.25, adam_beta2=0.5, max_prompt_length=64)
    model_config = load.read_model_config(path, "policy", load.load_tokenizer(path, config), config)
    policy = Policy(load.load_policy(path, model_config, config))
    policy = fsdp.shard(policy, config, distributed.mesh())
    optimizer = optim.build_optimizer(policy, config)
    saver = tiny.checkpointer(tmp_path, policy, optimizer)
    assert saver.load(layout.folder_of(saved, SAVED)) == SAVED
    assert optimizer.state
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.5)}
    with pytest.raises(UserError, match=f"at step {SAVED} and the run has {SAVED - 1} steps"):
        RunLogger(config, SAVED - 1, SAVED)


@pytest.mark.usefixtures("process_group", "without_pictures")
def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    """Unless it is to be trained again, or what it starts from or learns from has changed."""
    start = tiny.save(tiny.causal_lm("gpt2", is_plain=True, vocab_size=300), tmp_path / "start")
    flags = {"model_name_or_path": start, "output_dir": str(tmp_path / "run")}
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 8)
    flags |= {
        "dataset_name": str(rows),
        "max_prompt_length": 64,
        "max_completion_length": 16,
        "require_stop_token": False,
    }
    flags |= {"num_train_rows": 8, "num_eval_rows": 2, "max_steps": 1, "batch_size": 2}
    holds: list[bool] = []
    plots.plot_run.side_effect = lambda folder: holds.append(folder.absolute() in output_lock._held)
    train_sft.main(SFTConfig(**flags))
    assert f"model: {tmp_path}/run/model  curves: {tmp_path}/run/plots" in capsys.readouterr().out
    assert holds == [True]  # up to the mark, without which another run would make it again
    assert (tmp_path / "run") not in output_lock._held
    weights = tmp_path / "run" / "model" / "model.safetensors"
    written_at = weights.stat().st_mtime_ns
    with pytest.raises(signals.Stopped, match="finished before: .* none trains it again"):
        train_sft.main(SFTConfig(**flags))
    assert weights.stat().st_mtime_ns == written_at
    train_sft.main(SFTConfig(**flags, resume_from_checkpoint="none"))
    assert weights.stat().st_mtime_ns > written_at
    for changed in (tmp_path / "start" / "config.json", rows):
        written_at = weights.stat().st_mtime_ns
        changed.write_text(changed.read_text() + "\n")
        train_sft.main(SFTConfig(**flags))
        assert weights.stat().st_mtime_ns > written_at
        assert capsys.readouterr().out.count("is trained again") == 1
    rows.touch()  # the same rows
    with pytest.raises(signals.Stopped, match="finished before"):
        train_sft.main(SFTConfig(**flags))


def test_an_edited_file_of_a_resumed_run_is_named(tmp_path, capsys):
    objective, config = tmp_path / "mine.py", tiny.train_config(output_dir=str(tmp_path / "run"))
    objective.write_text("# first")
    config = replace(config, dataset_name=f"{objective}:function")
    environment.save_run_files(tmp_path / "run", config, 1)
    assert resume.changed_inputs(config) == []
    resume.warn_of_changed_inputs(config)
    assert capsys.readouterr().out == ""
    objective.write_text("# second")
    assert resume.changed_inputs(config) == [f"{objective}:function"]
    resume.warn_of_changed_inputs(config)
    warning = f"warning: {objective}:function has changed: the run goes on with the new one\n"
    assert capsys.readouterr().out == warning


def test_the_last_model_of_another_run_is_set_aside(tmp_path, capsys):
    config = tiny.train_config(output_dir=str(tmp_path), seed=1)
    for seed in (1, 2, 3):  # its own stays; that of seed 2 is set aside, then seed 3's in its place
        environment.save_run_files(tmp_path, replace(config, seed=seed), 1)
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / f"of_{seed}").touch()
        resume.set_aside_other_model(config)
        assert (tmp_path / "model").exists() == (seed == 1)
    assert [path.name for path in (tmp_path / "model.before").iterdir()] == ["of_3"]
    place = (tmp_path / "model.before").resolve()
    assert capsys.readouterr().out == f"the model of another run is in {place} now\n" * 2


@pytest.mark.parametrize(
    ("before", "now", "clauses"),
    [(4, 4, []), (4, 8, []), (0, 0, []), (4, 0, ["was 4 and is 0"]), (0, 4, ["was 0 and is 4"])],
)
def test_a_named_checkpoint_has_a_moving_reference_or_none(monkeypatch, before, now, clauses):
    """Its weights are in the checkpoint; how often it moves is another run's own choice."""
    needed = {"output_dir": "a", "model_name_or_path": "b", "reward_funcs": ["gold"]}
    config = GRPOConfig(**needed, ref_update_steps=now)
    saved = {"ref_update_steps": before, "seed": 7, "beta": 0.9}
    manifest = {"stage": "GRPOConfig", "config": saved}
    monkeypatch.setattr(layout, "read_manifest", lambda _: manifest)
    found = resume.other_run(Path("a"), config, any_config=True)
    assert [clause.removeprefix("ref_update_steps ") for clause in found] == clauses


def test_a_run_that_lost_a_rank_and_one_that_was_stopped_end_as_if_they_had_not(tmp_path):
    fault_drill.prepare(tmp_path)
    case = fault_drill.Case("grpo", 2, {"max_steps": 8, "ref_update_steps": 3})
    tally = fault_drill.drill(case, ["one", "stop"], tmp_path, random.Random(0))
    assert not tally.wrong
    assert (tally.kills, tally.stops) == (1, 1)
    assert (tally.identical, tally.lost_steps) == (tally.runs, 0)


@pytest.mark.parametrize("stage", ["grpo", "dpo"])
def test_a_flag_that_means_another_one_where_it_is_empty_is_compared_by_its_meaning(stage):
    """Runs of before saved the reference's path, and the number of candidates, filled in."""
    cls = config_class(f"train_{stage}.py")
    needed: dict[str, Any] = {"output_dir": "x", "model_name_or_path": "base"}
    needed |= {"reward_funcs": ["gold"]} if stage == "grpo" else {}
    config = cls(**needed)
    saved = asdict(config)
    filled = {"ref_model_name_or_path": "base"}
    filled |= {"num_candidates": config.num_generations} if stage == "grpo" else {}
    assert changed_fields(saved | filled, config) == []
    assert changed_fields(saved, cls(**needed, **filled)) == []
    (other,) = changed_fields(saved | {"ref_model_name_or_path": "other"}, config)
    assert other == "ref_model_name_or_path was 'other' and is 'base'"
