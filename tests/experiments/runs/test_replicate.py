"""Claim: a recipe's chain is run for every seed, and compared with what was published.

The stages are real and two steps long, in this process. About `experiments.runs.replicate`,
`experiments.runs.replication` and `experiments.runs.row_maker`.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import test_recipes
import tiny
import yaml
from scipy import stats
from stages_here import run_here

from common.config.parser import parse
from common.errors import UserError
from experiments.runs import engine, replicate, stages
from experiments.runs.engine import Study
from experiments.runs.executors import Here
from experiments.runs.outcomes import over_seeds
from experiments.runs.power import power_of
from experiments.runs.replicate import ReplicateConfig
from experiments.runs.replication import Published, read_published, source_lines
from experiments.runs.stages import ROOT, Stage, command, config_of

pytestmark = pytest.mark.usefixtures("without_pictures", "few_resamples")

SHORT = ["max_steps=2", "batch_size=2", "num_train_rows=12", "num_eval_rows=5", "num_prompts=3"]
SHORT += ["grpo.num_candidates=4", "grpo.num_generations=2", "num_sft_rows=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where recipes are, in a process group of one."""
    folder = tmp_path_factory.mktemp("replicate")
    shutil.copytree(ROOT / "assets" / "recipes", folder / "assets" / "recipes")
    with tiny.working_directory(folder):
        yield folder


@pytest.fixture
def made(monkeypatch) -> list[Stage]:
    """The stages that were asked for, which run here."""
    asked_for = []

    def run(stage: Stage) -> None:
        asked_for.append(stage)
        run_here(stage)

    monkeypatch.setattr(stages, "run", run)
    return asked_for


def cells(folder: str) -> dict:
    """Our cells of a replication by system and metric."""
    record = json.loads(Path(folder, "replication.json").read_text())
    return {(cell["system"], cell["metric"]): cell for cell in record["ours"]}


def test_the_demo_runs_from_end_to_end_for_every_seed(folder, made, capsys):
    (folder / "assets/recipes/demo/published.yaml").write_text(
        "published:\n"
        "  - {system: reward, metric: accuracy, value: 0.61, source: A paper, note: Of 1B.}\n"
        "  - {system: reward, metric: accuracy, value: 0.5, source: Another}\n"
        "  - {system: grpo, metric: win rate, value: 0.7, source: A paper}\n"
    )
    arguments = ["--recipe", "demo", "--seeds", "4", "7", "--overrides", *SHORT]
    replicate.main(parse(ReplicateConfig, arguments))
    root = "output/replicate/demo"
    assert [str(stage.output_dir) for stage in made] == [
        f"{root}/seed_{seed}/{name}"
        for seed in (4, 7)
        for name in ("sft", "reward", "dpo", "grpo", "evaluation")
    ]
    ours = cells(root)
    by_hand = []
    for seed in (4, 7):
        config = yaml.safe_load(Path(f"{root}/seed_{seed}/reward/config.yaml").read_text())
        assert (config["seed"], config["max_steps"]) == (seed, 2)
        assert config["model_name_or_path"] == f"{root}/seed_{seed}/sft/model"
        results = json.loads(Path(f"{root}/seed_{seed}/evaluation/results.json").read_text())
        (reward,) = [s for s in results["systems"] if s["kind"] == "reward_model"]
        by_hand.append(100 * reward["accuracy"]["accuracy"])
    cell = ours["reward", "accuracy"]
    assert list(cell["by_seed"].values()) == by_hand
    assert cell["mean"] == pytest.approx(sum(by_hand) / 2)
    assert cell["n"] == 2
    target = stats.ttest_1samp(by_hand, 0).confidence_interval(0.95)
    assert cell["low"] == pytest.approx(target.low)
    assert {("grpo", "gold_reward"), ("grpo", "kl"), ("dpo", "accuracy")} <= set(ours)
    assert ("grpo", "win rate") not in ours
    out = capsys.readouterr().out
    lines = [line for line in out.rpartition("| metric")[0].splitlines() if line[:2] == "| "]
    (row,) = [line for line in lines if line.startswith("| reward") and "accuracy" in line]
    assert [cell.strip() for cell in row.split("|")[3:4]] == ["61 (1); 50 (2)"]
    (row,) = [line for line in lines if line.startswith("| grpo") and "win rate" in line]
    assert [cell.strip() for cell in row.split("|")[3:7]] == ["0.7 (1)", "", "", ""]
    text = Path(root, "report.md").read_text()
    assert "This is not the recipe" in text
    assert Path(root, "plots/differences.png").is_file()
    assert "finished (10 of 10 finished, " in out
    assert out.endswith("\n2 of 2 seeds finished.\n")
    paired = next(iter(json.loads(Path(root, "replication.json").read_text())["differences"]))
    assert (paired["outcome"], paired["detail"], paired["choice"]) == (
        *("accuracy", "reward", "compared with sft"),
    )
    sft = list(ours["sft", "accuracy"]["by_seed"].values())
    target = stats.ttest_rel(by_hand, sft).confidence_interval(0.95)
    ends = (paired["difference"]["low"], paired["difference"]["high"])
    assert ends == pytest.approx((target.low, target.high))
    by_seed = np.subtract(by_hand, sft).tolist()
    assert paired["power"] == asdict(power_of(over_seeds(by_seed)))
    assert "A paper: Of 1B." in text
    assert Path(root, "report.html").is_file()


def test_it_goes_on_where_it_was_stopped_and_reports_what_there_is(folder, monkeypatch):
    """After the runs of the test above."""
    arguments = ["--recipe", "demo", "--seeds", "4", "7", "--overrides", *SHORT]
    root = Path("output/replicate/demo")
    before = (root / "replication.json").read_bytes()
    shutil.rmtree(root / "seed_7" / "evaluation")
    replicate.main(parse(ReplicateConfig, [*arguments, "--report_only", "true"]))
    assert cells(str(root))["reward", "accuracy"]["n"] == 1
    text = (root / "report.md").read_text()
    assert "1 of 2 seeds finished; seed 7 lacks evaluate." in text
    models = [root / "seed_7" / name / "model" / "config.json" for name in ("sft", "grpo")]
    written = [file.stat().st_mtime_ns for file in models]
    monkeypatch.setattr(stages, "run", run_here)
    replicate.main(parse(ReplicateConfig, arguments))
    assert [file.stat().st_mtime_ns for file in models] == written
    assert (root / "replication.json").read_bytes() == before


def test_a_recipe_of_downloaded_data_runs_on_local_rows_of_its_schema(folder, made):
    """The names are overridden; the rest is the recipe's."""
    test_recipes.save_model(folder / "Instruct")
    test_recipes.make_gsm8k(folder)
    overrides = [*SHORT[:3], *SHORT[4:7], "model_name_or_path=Instruct", "bf16=false"]
    overrides += ["evaluate.num_generations=2", "evaluate.temperature=1"]
    arguments = ["--recipe", "gsm8k", "--seeds", "0", "--overrides", *overrides]
    replicate.main(parse(ReplicateConfig, arguments))
    assert len(made) == 3
    ours = cells("output/replicate/gsm8k")
    assert ("grpo", "reward/gsm8k") in ours
    rates = {f"judged/gsm8k/{rate}" for rate in ("pass@1", "pass@2", "maj@2")}
    assert {(system, rate) for system in ("sft", "grpo") for rate in rates} <= set(ours)


def test_what_cannot_be_is_refused(folder):
    for arguments, sentence in (
        ([], "--recipe is ''; it must be a folder with recipes of stages (sft.yaml, pairs.yaml,"),
        (["--recipe", "tests"], "or one of count, demo, distillation, film, gsm8k"),
        (["--recipe", "demo", "--seeds", "1", "1"], "must be one or more distinct numbers"),
        (["--recipe", "demo", "--overrides", "max_step=3"], "did you mean max_steps?"),
        (["--recipe", "demo", "--overrides", "sft.num_prompts=3"], "must be flag=value or"),
        (["--recipe", "demo", "--overrides", "max_steps"], "must be flag=value or"),
        (["--recipe", "demo", "--overrides", "seed=7"], "must be flag=value or"),
        (["--recipe", "demo", "--overrides", "sft.output_dir=x"], "must be flag=value or"),
    ):
        with pytest.raises(UserError) as caught:
            replicate.main(parse(ReplicateConfig, arguments))
        assert sentence in str(caught.value)


def test_a_recipe_s_patches_are_those_of_its_stages(folder, capsys):
    config = parse(ReplicateConfig, ["--recipe", "origin", "--seeds", "0", "--dry_run", "true"])
    patches = {name: stage.patch for name, stage in replicate.chain(config, 0).items()}
    assert {name for name, patch in patches.items() if patch} == {"reward", "grpo"}
    assert all(patch is None or (ROOT / patch).is_file() for patch in patches.values())
    replicate.main(config)
    lines = [line for line in capsys.readouterr().out.splitlines() if "patched.py" in line]
    assert [
        str(patches[name]) in line for name, line in zip(("reward", "grpo"), lines, strict=True)
    ]


def test_rows_that_are_not_there_are_asked_for_before_any_stage(folder, made):
    """Not for a list of the commands."""
    maker = Path("assets/recipes/count/make_rows.py")
    recipe = Path("assets/recipes/count/sft.yaml")
    recipe.write_text(recipe.read_text().replace("dataset_name: syn", "dataset_name: data/syn"))
    maker.touch()
    arguments = ["--recipe", "count", "--seeds", "0"]
    replicate.main(parse(ReplicateConfig, [*arguments, "--dry_run", "true"]))
    asked = "data/synthetic does not exist; `python assets/recipes/count/make_rows.py` makes it"
    with pytest.raises(UserError, match=asked):
        replicate.main(parse(ReplicateConfig, arguments))
    assert not made


def test_published_values_have_sources(folder):
    files = sorted((ROOT / "assets" / "recipes").glob("*/published.yaml"))
    assert files
    for file in files:
        for row in read_published(file):
            assert row.source
            assert row.value is None or 0 < row.value < 1, "shares of 1"
    file = folder / "published.yaml"
    file.write_text("published:\n  - {system: a, metric: b, worth: 1}\n")
    with pytest.raises(UserError, match="'worth' .the keys are system, metric, source"):
        read_published(file)


def test_an_override_of_one_stage_wins_and_the_chain_stays_one(folder, made, capsys):
    """A dry run prints the command of every stage, each below its folder."""
    overrides = ["grpo.beta=0.1", "beta=0.5", "model_name_or_path=mine", "dpo.max_steps=3"]
    arguments = ["--recipe", "sentiment", "--seeds", "0", "--dry_run", "true", "--overrides"]
    replicate.main(parse(ReplicateConfig, [*arguments, *overrides, "dataset_name=rows"]))
    *printed, count = capsys.readouterr().out.splitlines()
    assert count == "# 0 of 5 runs are finished"
    assert all(line.endswith(": to be made") for line in printed[::2])
    lines = [line.split() for line in printed[1::2]]
    root = "output/replicate/sentiment/seed_0"
    model, rows = "--model_name_or_path=", "--dataset_name="
    for words, expected in zip(
        lines,
        [
            ["train_sft.py", f"{model}mine", f"{rows}rows"],
            ["experiments.sample_pairs", f"{model}{root}/sft/model", f"{rows}rows"],
            ["train_dpo.py", f"{model}{root}/sft/model", f"{rows}{root}/pairs", "--beta=0.5"],
            ["train_grpo.py", f"{model}{root}/sft/model", f"{rows}rows", "--beta=0.1"],
            [
                "evaluate.py",
                f"--ref_model_name_or_path={root}/sft/model",
                f"{rows}{root}/pairs",
                "--prompts_dataset_name=rows",
            ],
        ],
        strict=True,
    ):
        assert {word.removeprefix(f"{ROOT}/") for word in words} >= set(expected)
    assert not [word for word in lines[-1] if word.startswith(model)], (
        "the first policy's tokenizer"
    )
    assert ["--max_steps=3" in words for words in lines] == [False, False, True, False, False]
    assert not made


def test_one_data_set_takes_the_place_of_one(folder):
    """Wherever the recipe names the first stage's; other data sets stay."""

    def data_sets(recipe: str, *overrides: str) -> list[str]:
        arguments = ["--recipe", recipe, "--overrides"]
        stages = replicate.chain(parse(ReplicateConfig, [*arguments, *overrides]), 0).values()
        words = [word for stage in stages for word in command(stage)]
        return sorted(word.removeprefix("--") for word in words if "dataset_name=" in word)

    mine = ["dataset_name=mine"]
    assert data_sets("demo", *mine) == [*mine * 5, "sft_dataset_name=mine"]
    changes = ["reward.dataset_name=pairs", "sft_dataset_name=its"]
    assert data_sets("demo", *changes, *mine) == (
        [*mine * 4, "dataset_name=pairs", "sft_dataset_name=its"]
    )
    renamed = ["prompts_dataset_name=mine", "sft_dataset_name=mine"]
    assert data_sets("tldr-gpt2", *mine) == [*mine * 2, *renamed]
    pairs = [f"{stage}.dataset_name=pairs" for stage in ("reward", "dpo", "evaluate")]
    assert data_sets("tldr-gpt2", *mine, *pairs) == (
        [*mine * 2, *["dataset_name=pairs"] * 3, *renamed]
    )


def test_a_data_set_s_name_is_no_tokenizer_s_and_a_model_brings_its_own(folder):
    """The demo's data set and its tokenizer are both `synthetic`."""

    def tokenizer(*overrides: str) -> str:
        stages = replicate.chain(parse(ReplicateConfig, ["--recipe", "demo", *overrides]), 0)
        return config_of(stages["sft"]).tokenizer_path

    assert tokenizer("--overrides", "dataset_name=mine") == "synthetic"
    assert tokenizer("--overrides", "model_name_or_path=mine.json") == "synthetic"
    assert tokenizer("--overrides", "model_name_or_path=mine") == "mine"
    both = ["model_name_or_path=mine", "tokenizer_name_or_path=its"]
    assert tokenizer("--overrides", *both) == "its"


def test_a_recipe_is_any_folder_and_its_runs_are_in_folders_of_their_seed(folder, tmp_path):
    """A copy still names the folders of what it was copied from."""
    copy = shutil.copytree(ROOT / "assets/recipes/demo", tmp_path / "mine")
    with tiny.working_directory(tmp_path):
        for recipe in (str(copy), "mine/"):
            chain = replicate.chain(parse(ReplicateConfig, ["--recipe", recipe]), 1)
            assert [str(stage.output_dir) for stage in chain.values()][:2] == [
                "output/replicate/mine/seed_1/sft",
                "output/replicate/mine/seed_1/reward",
            ]
            assert config_of(chain["grpo"]).reward_funcs == [
                "output/replicate/mine/seed_1/reward/model",
                "gold",
            ]
        assert parse(ReplicateConfig, ["--recipe", "film"]).folder == ROOT / "assets/recipes/film"
        shutil.copy(copy / "reward.yaml", copy / "reward-small.yaml")
        with pytest.raises(UserError, match=r"reward.yaml and reward-small.yaml have the same out"):
            replicate.chain(parse(ReplicateConfig, ["--recipe", "mine"]), 1)


def test_runs_are_counted_and_the_time_left_is_that_of_runs_like_them(monkeypatch, capsys):
    """The first two take 60 s and 180 s; the third was finished before."""
    now = [0.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    scripts = ["train", "evaluate"] * 2
    runs = [Stage(script, Path(f"run_{i}")) for i, script in enumerate(scripts)]
    study = Study(runs, Here())
    for run, seconds in zip(runs, (60, 180, 0, 180), strict=True):
        if seconds:
            study.note(run.output_dir, "running")
        now[0] += seconds
        study.note(run.output_dir, "finished" if seconds else "finished before")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "run_1: running (1 of 4 finished, 1 running, 2 waiting, 1 min so far, about 3 min left)"
    )
    assert [line.split(" (")[1] for line in lines[3:5]] == [
        "2 of 4 finished, 2 waiting, 4 min so far, about 4 min left)",
        "3 of 4 finished, 1 waiting, 4 min so far, about 3 min left)",
    ]


def test_sources_are_numbered_once():
    rows = [Published("a", "m", s, 0.5, note) for s, note in (("X", "n."), ("Y", ""), ("X", "o."))]
    assert source_lines(rows) == ["- (1) X: n. o.", "- (2) Y"]
