"""Claim: a run of a stage is made once, and again only when something that made it has changed.

The scripts here are a few lines that write what a stage writes; every run is a child process, as in
a driver. One run is of a real stage, with a patch. About `experiments.runs.stages` and
`experiments.runs.patched`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from experiments.runs import stages
from experiments.runs.stages import Stage, StageFailed, description, is_finished, run

SCRIPT = """
import sys
from pathlib import Path
flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = Path(flags["output_dir"])
(folder / "runs.txt").open("a").write(" ".join(sys.argv[1:]) + "\\n")
print("a line of output")
mode = flags.get("mode", "")
if mode == "refuse":
    print("error: --mode is refuse; it must not be.", file=sys.stderr)
    sys.exit(2)
if mode == "fail":
    raise ZeroDivisionError("as asked")
if mode == "stop":
    print("stopped after step 2 by SIGTERM; the same command goes on from x.")
    sys.exit(143)
else:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return Stage(str(script), tmp_path / "run", flags={"rate": 1e-4, "is_on": True})


def runs(stage: Stage) -> list[str]:
    return (stage.output_dir / "runs.txt").read_text().splitlines()


def test_a_finished_run_is_not_made_again(stage, capsys):
    assert not is_finished(stage)
    run(stage)
    assert is_finished(stage)
    run(stage)
    assert runs(stage) == [f"--rate=0.0001 --is_on=true --output_dir={stage.output_dir}"]
    shown = capsys.readouterr().out
    assert "a line of output" in shown
    assert "finished before" in shown
    assert "a line of output" in (stage.output_dir / "stage.log").read_text()


def test_a_run_is_made_again_when_its_flags_or_what_it_reads_change(stage, tmp_path):
    recipe, rewards = tmp_path / "recipe.yaml", tmp_path / "rewards.py"
    recipe.write_text("seed: 1\n")
    rewards.write_text("# first\n")
    flags = {"rate": 1e-4, "reward_funcs": [f"{rewards}:long", "gold"]}
    stage = replace(stage, config=recipe, flags=flags)
    run(stage)
    run(replace(stage, flags={**flags, "rate": 2e-4}))
    run(stage)  # the folder now holds the other run
    recipe.write_text("seed: 2\n")
    run(stage)
    rewards.write_text("# second\n")
    run(stage)
    run(stage)
    assert len(runs(stage)) == 5
    assert runs(stage)[-1].startswith(f"--config {recipe} --rate=0.0001 --reward_funcs {rewards}:")


def test_what_was_built_on_a_run_is_made_again_with_it(stage, tmp_path):
    later = replace(
        stage, output_dir=tmp_path / "later", flags={"init": f"{stage.output_dir}/model"}
    )
    for _ in range(2):
        run(stage)
        run(later)
    assert len(runs(later)) == 1
    run(replace(stage, flags={"rate": 3e-4}))
    assert not is_finished(later)
    run(later)
    assert len(runs(later)) == 2


def test_what_refuses_fails_or_stops_is_not_finished(stage):
    refused = replace(stage, flags={"mode": "refuse"})
    with pytest.raises(UserError, match="script.py for .*run: --mode is refuse; it must not be"):
        run(refused)
    failed = replace(stage, flags={"mode": "fail"})
    with pytest.raises(StageFailed, match=r"(?s)status 1.*a line of output.*as asked"):
        run(failed)
    stopped = replace(stage, flags={"mode": "stop"})
    run(stage)  # a result of an earlier run does not count
    with pytest.raises(StageFailed, match="was stopped; the same command goes on"):
        run(stopped)
    assert not any(map(is_finished, (stage, refused, failed, stopped)))


def test_a_run_whose_end_its_driver_did_not_see_is_finished(stage):
    """The driver was killed between the run's last file and the mark; the script trains nothing."""
    run(stage)
    (stage.output_dir / stages.MARK).unlink()
    (stage.output_dir.parent / "script.py").write_text("print('finished before')\n")
    run(stage)
    assert is_finished(stage)


def test_torchrun_starts_several_processes(stage):
    assert stages.command(stage)[1] == stage.script
    words = stages.command(replace(stage, patch=Path("bug.py"), num_processes=2))
    assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert words[6:9] == [str(stages.PATCHED), "bug.py", stage.script]


def test_a_patch_runs_before_a_real_stage_and_is_named(tmp_path, capfd):
    patch = tmp_path / "bug.py"
    patch.write_text(
        '"""No parameter moves."""\n'
        "from common.model import optim\n"
        "optim.learning_rate = None\n"
        "def clip_and_step(*_): return {'grad_norm': 7.0}\n"
        "optim.clip_and_step = clip_and_step\n"
    )
    root = stages.ROOT
    sizes = {"max_steps": 1, "logging_steps": 1, "num_train_rows": 8, "num_eval_rows": 4}
    sizes |= {"batch_size": 4, "warmup_steps": 0, "num_sample_prompts": 0}
    flags = {**sizes, "model_name_or_path": root / "assets/recipes/demo/gpt2-tiny.json"}
    recipe = root / "assets" / "recipes" / "demo" / "sft.yaml"
    stage = Stage("train_sft.py", tmp_path / "sft", recipe, flags, patch)
    run(stage)
    assert "!!! PATCHED" in capfd.readouterr().out
    lines = (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()
    assert 7.0 in [json.loads(line).get("grad_norm") for line in lines]
    environment = json.loads((tmp_path / "sft" / "environment.json").read_text())
    assert environment["script"] == "train_sft.py"
    assert is_finished(stage)
    patch.write_text('"""Another one."""\n')
    assert not is_finished(stage)


def test_checkpoints_of_what_was_made_otherwise_are_not_gone_on_with(stage, tmp_path):
    """Their flags may read the same where the model that they start from has changed."""
    script = tmp_path / "train_sft.py"
    script.write_text(SCRIPT)
    base = tmp_path / "base.txt"
    base.write_text("first")
    later = replace(stage, script=str(script), flags={"init": str(base), "mode": "fail"})
    for content in ("first", "first", "second"):
        base.write_text(content)
        with pytest.raises(StageFailed):
            run(later)
    anew = ["--resume_from_checkpoint=none" in words for words in runs(later)]
    assert anew == [True, False, True]


def test_rows_in_a_folder_are_noticed_and_an_empty_flag_names_none(stage, tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("{}\n")
    stage = replace(stage, flags={"data": str(rows), "dataset_test_split": ""})
    run(stage)
    assert description(stage)["inputs"].keys() == {str(rows)}
    (rows / "train.jsonl").write_text("{}\n{}\n")
    assert not is_finished(stage)
