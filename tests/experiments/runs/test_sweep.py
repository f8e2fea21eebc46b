"""Claim: a sweep runs what its file says, pairs by seed, and reports the effect that is there.

The arithmetic is tested in a world where a run's outcome is a known function of its seed and flags;
one small sweep is real. About `experiments.runs.sweep`.
"""

import datetime
import json
import runpy
import shlex
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import tiny
import torch
import yaml
from scipy import stats
from stages_here import run_here
from statsmodels.stats.power import TTestPower
from transformers import AutoModelForSequenceClassification

from common import advantages, distributed
from common import batch as batching
from common.config.grpo import GRPOConfig
from common.errors import UserError
from common.evaluation.accuracy import Interval, PreferenceAccuracy
from common.evaluation.results import Results, System, write_results
from common.forward import Policy, RewardModel, sequence_scores
from common.grpo import rollouts
from common.model import fsdp, optim
from common.sampling import decode
from common.text.reading import load_rows
from experiments.runs import stages
from experiments.runs.stages import ROOT, Stage, config_of, description, write_mark
from experiments.runs.sweep import __main__ as sweep
from experiments.runs.sweep.sweep_file import read_sweep, run_names

pytestmark = pytest.mark.usefixtures("without_pictures")

RECIPES = ROOT / "assets" / "recipes"
ABLATIONS = RECIPES / "ablations"
NOISE = {0: 0.3, 1: -0.5, 2: 0.1}  # of a seed, shared by all its runs
EFFECTS = {0: 0.02, 1: 0.03, 2: 0.01}  # of the variant


def small() -> dict:
    """A file as YAML has it."""
    return {
        "seeds": [0, 1, 2],
        "output_dir": "sweep",
        "base": {
            "sft": {"script": "train_sft.py", "config": "sft.yaml"},
            "reward": {
                "script": "train_reward.py",
                "config": "reward.yaml",
                "flags": {"model_name_or_path": "{sft}/model"},
                "outcomes": ["accuracy"],
            },
            "grpo": {
                "script": "train_grpo.py",
                "config": "grpo.yaml",
                "flags": {"model_name_or_path": "{sft}/model", "reward_funcs": ["{reward}/model"]},
                "outcomes": ["gold_reward", "entropy"],
            },
        },
        "evaluation": {"config": "evaluate.yaml", "reference": "sft", "judge": "reward"},
        "variants": [
            {"detail": "head", "choice": "zeros", "stage": "reward", "flags": {"x": 1}},
            {"detail": "scope", "choice": "wide", "stage": "grpo", "flags": {"x": 1}},
            {"detail": "scope", "choice": "none", "stage": "grpo", "flags": {"x": 2}},
        ],
    }


def write(folder: Path, contents: dict) -> str:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(contents, sort_keys=False))
    return str(file)


def outcome(stage: Stage) -> float:
    """In this world, with everything that a run was built on."""
    seed = stage.flags["seed"]
    return NOISE[seed] + (EFFECTS[seed] if stage.flags.get("x") == 1 else 0)


def pretend(stage: Stage) -> None:
    """Write what a run would."""
    stage.output_dir.mkdir(parents=True, exist_ok=True)
    if stage.script != "evaluate.py":
        line = {"step": 1, "entropy": outcome(stage), "elapsed_minutes": 3.0}
        (stage.output_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (stage.output_dir / "made_of.json").write_text(
            json.dumps([outcome(stage), stage.flags.get("reward_funcs")])
        )
        environment = {"git_commit": "abc", "world_size": stage.num_processes}
        (stage.output_dir / "environment.json").write_text(json.dumps(environment))
    else:
        systems = []
        for path in [*stage.flags["policies"], *stage.flags["reward_models"]]:
            value, _ = json.loads((Path(path).parent / "made_of.json").read_text())
            accuracy = PreferenceAccuracy(value, 0, 1, 9, 0)
            reward = Interval(value, 0, 1)
            systems.append(System("", "policy", path, accuracy=accuracy, gold_reward=reward))
        write_results(Results(systems=systems), stage.output_dir)
    write_mark(stage.output_dir, description(stage))


@pytest.fixture(autouse=True)
def recipes(tmp_path, monkeypatch):
    """Empty recipes, in the folder where the test runs; flags of no script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check_flags", lambda stages: None)
    for name in ("sft", "reward", "grpo", "evaluate"):
        (tmp_path / f"{name}.yaml").touch()


def test_effects_are_differences_to_the_base_of_the_same_seed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "run", pretend)
    sweep.main(["--config", write(tmp_path, small())])
    record = json.loads(Path("sweep/sweep.json").read_text())
    by_choice = {(e["choice"], e["outcome"]): e["difference"] for e in record["effects"]}
    differences = [100 * EFFECTS[seed] for seed in (0, 1, 2)]
    target = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    zeros = by_choice["zeros", "accuracy"]
    assert zeros["mean"] == pytest.approx(2.0)
    assert (zeros["low"], zeros["high"]) == pytest.approx((target.low, target.high))
    assert zeros["n"] == 3
    assert by_choice["none", "gold_reward"]["mean"] == pytest.approx(0)
    assert by_choice["none", "entropy"]["mean"] == pytest.approx(0)
    lines = [(e["choice"], e["outcome"], e["together"]["family"]) for e in record["effects"]]
    assert lines == [
        ("zeros", "accuracy", 1),
        *(("wide", "gold_reward", 2), ("none", "gold_reward", 2)),
        *(("wide", "entropy", 0), ("none", "entropy", 0)),
    ], "a stage's lines are a family in its first outcome"
    verdicts = {e["choice"]: e["verdict"] for e in record["effects"] if e["verdict"]}
    of_two = stats.ttest_1samp(differences, 0).confidence_interval(0.975)
    assert verdicts == {
        "zeros": f"no larger than {target.high:.2f}",
        "wide": f"no larger than {of_two.high:.2f}",
        "none": "no larger than 0.00",
    }
    values = {(each["system"], each["metric"]): each for each in record["measured"]}
    base = values["reward", "accuracy"]
    assert base["mean"] == pytest.approx(100 * sum(NOISE.values()) / 3)
    assert base["sd"] == pytest.approx(float(torch.tensor([30.0, -50.0, 10.0]).std()))
    assert record["git_commits"] == ["abc"]
    assert record["training_minutes"] == 3 * 3.0 * (3 + 1 + 1 + 1)
    table = capsys.readouterr().out
    assert f"+2.00 [{target.low:+.2f}, {target.high:+.2f}]" in table
    powers = {(e["choice"], e["outcome"]): e["power"] for e in record["effects"]}
    size = TTestPower().solve_power(nobs=3, alpha=0.05, power=0.8)  # of a standard deviation of 1
    assert powers["zeros", "accuracy"]["detectable"] == pytest.approx(size)
    assert powers["none", "gold_reward"] == {"detectable": None, "seeds_needed": None}
    needed = powers["zeros", "accuracy"]["seeds_needed"]
    (row,) = [line for line in table.splitlines() if " zeros |" in line]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[4:8] == [f"{size:.2f}", str(needed), verdicts["zeros"], "3"]
    for name in ("report.html", "report.md", "plots/forest.png"):
        assert Path("sweep", name).is_file()


def test_every_judged_run_may_be_compared_with_one_stage(tmp_path, monkeypatch, capsys):
    """Also the stages of the base chain; those with other outcomes are left out."""
    monkeypatch.setattr(stages, "run", pretend)
    contents = small()
    flags = {"model_name_or_path": "{sft}/model", "x": 1}
    dpo = {"script": "train_dpo.py", "config": "grpo.yaml", "flags": flags}
    contents["base"]["dpo"] = dpo | {"outcomes": ["entropy", "gold_reward"]}
    contents["compared_with"] = "grpo"
    sweep.main(["--config", write(tmp_path, contents)])
    record = json.loads(Path("sweep/sweep.json").read_text())
    effects = {(e["detail"], e["choice"], e["outcome"]): e for e in record["effects"]}
    assert {key[:2] for key in effects} == {
        ("dpo", "as in the recipe"),
        ("scope", "wide"),
        ("scope", "none"),
    }
    target = stats.ttest_1samp([2.0, 3.0, 1.0], 0).confidence_interval(0.95)
    effect = effects["dpo", "as in the recipe", "gold_reward"]
    assert effect["difference"]["low"] == pytest.approx(target.low)
    assert effect["base_by_seed"] == [100 * NOISE[seed] for seed in (0, 1, 2)]
    out = capsys.readouterr().out
    assert f"+2.00 [{target.low:+.2f}, {target.high:+.2f}]" in out
    contents["compared_with"] = "sft"
    with pytest.raises(UserError, match="compared_with 'sft'; it must be one of reward, grpo"):
        read_sweep(write(tmp_path, contents))


def test_a_variant_is_built_on_the_base_of_its_seed(tmp_path):
    described = read_sweep(write(tmp_path, small()))
    runs = {str(stage.output_dir): stage.flags for stage in described.training(1)}
    base = "sweep/seed_1/base"
    scope = runs["sweep/seed_1/grpo_scope_none/grpo"]
    assert scope["reward_funcs"] == [f"{base}/reward/model"]
    assert (scope["seed"], scope["x"]) == (1, 2)
    assert "x" not in runs[f"{base}/grpo"]
    policies, models = described.evaluations(1)
    assert policies.flags["policies"] == [
        f"{base}/grpo/model",
        "sweep/seed_1/grpo_scope_wide/grpo/model",
        "sweep/seed_1/grpo_scope_none/grpo/model",
    ]
    assert policies.flags["reward_models"] == [f"{base}/reward/model"]
    names = [Path(path).parents[1].name for path in models.flags["reward_models"]]
    assert names == ["base", "reward_head_zeros"]


def test_a_file_that_cannot_be_is_refused(tmp_path):
    def message(change) -> str:
        contents = small()
        change(contents)
        with pytest.raises(UserError) as caught:
            list(read_sweep(write(tmp_path, contents)).training(0))
        return str(caught.value)

    first = lambda c: c["variants"][0]  # noqa: E731
    text = message(lambda c: first(c).update(flag=1))
    assert "variants[0] has the unknown key 'flag' (did you mean flags? the keys are detail" in text
    assert "variants[0] lacks stage;" in message(lambda c: first(c).pop("stage"))
    assert "'ppo'; it must be one of reward" in message(lambda c: first(c).update(stage="ppo"))
    assert "each must be there once" in message(lambda c: c["variants"].append(first(c)))
    assert "seeds [0, 0]; each must be there" in message(lambda c: c.update(seeds=[0, 0]))
    other = {"model_name_or_path": "{sfft}/model"}
    text = message(lambda c: c["base"]["grpo"].update(flags=other))
    assert "{sfft}/model in the flags must begin with one of ['{sft}', " in text
    assert "judge 'ppo'" in message(lambda c: c["evaluation"].update(judge="ppo"))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("seeds", 3, "seeds is 3; it must be a list, in [square brackets]."),
        ("seeds", ["0"], "seeds[0] is '0'; it must be a whole number, 0 or more."),
        ("seeds", [], "has no seeds; it must have at least one."),
        ("base", {}, "has no base; it must have at least one."),
        ("base", None, "base is empty; it must be `key: value` lines."),
        ("base", {1: {}}, "base has the key 1; it must be a text, in quotes."),
        ("base.sft", "train_sft.py", "base.sft is 'train_sft.py'; it must be `key: value` lines."),
        (
            "base.sft.script",
            "train_sf.py",
            "the script of sft 'train_sf.py'; it must be one of tra",
        ),
        ("base.sft.flags", None, "base.sft.flags is empty; it must be `key: value` lines."),
        ("base.sft.flags", {"beta": None}, "base.sft.flags.beta is empty; it must be a text or a"),
        ("base.sft.flags", {"x": {"y": 1}}, "base.sft.flags.x is {'y': 1}; it must be a text or"),
        ("base.grpo.outcomes", "kl", "base.grpo.outcomes is 'kl'; it must be a list"),
        ("base.a/b", {"script": "train_sft.py", "config": "x"}, "name must be that of a folder"),
        ("base.SFT", {"script": "train_sft.py", "config": "x"}, "differ by more than capital let"),
        ("evaluation", "evaluate.yaml", "evaluation is 'evaluate.yaml'; it must be `key: value`"),
        ("evaluation.reference", "output/x/model", "sft, reward, grpo or the folder of a finished"),
        ("variants", {"a": 1}, "variants is {'a': 1}; it must be a list"),
        ("variants", [None], "variants[0] is empty; it must be `key: value` lines."),
        ("variants.0.choice", datetime.date(2024, 1, 2), "choice is 2024-01-02; it must be a text"),
        ("variants.0.choice", float("inf"), "choice is inf; it must be a text or a finite number."),
        ("variants.0.num_processes", 0, "the num_processes 0 of variant 'zeros'; it must be above"),
        ("variants.0.num_processes", 1.5, "num_processes is 1.5; it must be a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_key(tmp_path, key, value, sentence):
    contents: dict = small()
    *path, last = key.split(".")
    place = contents
    for name in path:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    with pytest.raises(UserError) as caught:
        read_sweep(write(tmp_path, contents))
    assert sentence in str(caught.value)
    assert "sweep.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "lacks seeds, output_dir, base, evaluation, variants;"),
        ("seeds: [0\nbase: 1\n", "is not YAML: line 2: expected ',' or ']', but got ':'."),
        (
            "seeds: [0]\nbase:\n  sft: {flags: {a: 1, a: 2}}\n",
            "line 3: the key 'a' is there twice.",
        ),
        ("title: caf\xe9\n", "is not UTF-8: "),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_line(tmp_path, text, sentence):
    file = tmp_path / "sweep.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        read_sweep(str(file))
    assert sentence in str(caught.value)


WORDS = [  # of stage, detail and choice
    ("dpo", "beta", "0.05"),
    ("dpo", "beta", "0,05"),
    ("dpo", "beta 0", "05"),
    ("dpo", "BETA", "0.05"),
    ("dpo", "penalty", "-1"),
    ("dpo", "penalty", "+1"),
    ("dpo", "温度", "高"),
    ("dpo", "密度", "高"),
    ("dpo", "温度", "1"),
    ("dpo", "Größe", "1"),
    ("dpo", "Grosse", "1"),
    ("dpo", "long", 300 * "a"),
    ("dpo", "long", 300 * "a" + "b"),
    ("base", "", "+"),
    ("evaluation", "", "?"),
]


def test_runs_of_other_variants_have_other_folders(tmp_path):
    """Whatever their names are made of, also where capital letters do not distinguish folders."""
    contents = small()
    stage = contents["base"]["grpo"]
    contents["base"] |= dict.fromkeys(("dpo", "base", "evaluation"), stage)
    contents["variants"] = [
        {"stage": stage, "detail": detail, "choice": choice, "flags": {"x": i}}
        for i, (stage, detail, choice) in enumerate(WORDS)
    ]
    described = read_sweep(write(tmp_path, contents))
    runs = list(described.training(0))
    folders = [str(run.output_dir).casefold() for run in runs]
    assert len(set(folders)) == len(runs) == len(contents["base"]) + len(WORDS)
    assert [run.flags["x"] for run in runs if "x" in run.flags] == list(range(len(WORDS)))
    assert not any("/evaluation/" in folder for folder in folders if "/base/" not in folder)
    for folder in folders:
        assert folder.isascii()
        assert all(len(name) < 255 for name in folder.split("/"))
    assert folders[6] == "sweep/seed_0/dpo_beta_0_05/dpo", "a name of ASCII letters is its own"
    # A line that comes later moves no other
    contents["variants"].append({"stage": "dpo", "detail": "beta", "choice": "0 05"})
    more = [
        str(run.output_dir).casefold() for run in read_sweep(write(tmp_path, contents)).training(0)
    ]
    assert more[:-1] == folders
    # Of other letters not even one that comes before
    names = [run_names(words, set()) for words in (WORDS[6:8], WORDS[7:5:-1])]
    assert names[0] == names[1][::-1]


def test_reference_and_judge_may_be_finished_models(tmp_path):
    contents = small()
    for name in ("policy", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    contents["evaluation"] |= {"reference": "policy", "judge": str(tmp_path / "judge")}
    policies, _ = read_sweep(write(tmp_path, contents)).evaluations(0)
    assert policies.flags["ref_model_name_or_path"] == "policy"
    assert policies.flags["reward_models"] == [str(tmp_path / "judge")]


def test_a_dry_run_prints_what_is_finished_and_the_commands_and_makes_nothing(
    tmp_path, monkeypatch, capsys
):
    """A run that builds on one that is made again is made again too."""
    monkeypatch.setattr(stages, "run", pretend)
    file = write(tmp_path, small())
    sweep.main(["--config", file, "--seeds", "0"])
    monkeypatch.setattr(stages, "run", pytest.fail)
    before = sorted(tmp_path.rglob("*"))

    def states() -> dict[str, str]:
        capsys.readouterr()
        sweep.main(["--config", file, "--seeds", "0", "--dry-run"])
        lines = capsys.readouterr().out.splitlines()
        folders = [line.removeprefix("# ").split(": ") for line in lines[:-1:2]]
        for (folder, _), command in zip(folders, lines[1::2], strict=True):
            assert f"--output_dir={folder}" in shlex.split(command)
        return dict(folders)

    assert set(states().values()) == {"finished"}
    assert sorted(tmp_path.rglob("*")) == before
    changed = small()
    changed["base"]["reward"]["flags"] = {"model_name_or_path": "{sft}/model", "x": 5}
    write(tmp_path, changed)
    root = "sweep/seed_0"
    assert states() == {
        f"{root}/base/sft": "finished",
        f"{root}/base/reward": "to be made",
        f"{root}/base/grpo": "to be made",
        f"{root}/reward_head_zeros/reward": "finished",
        f"{root}/grpo_scope_wide/grpo": "to be made",
        f"{root}/grpo_scope_none/grpo": "to be made",
        f"{root}/evaluation/policies": "to be made",
        f"{root}/evaluation/reward_models": "to be made",
    }


@pytest.mark.parametrize("name", ["ablations", "iterative"])
def test_a_shipped_sweep_asks_for_what_the_stages_take(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    shipped = read_sweep(str(RECIPES / name / "demo.yaml"))
    assert len(shipped.seeds) >= 3
    for stage in shipped.training(0):
        config_of(stage)
        assert stage.num_processes in (1, 2)
    for stage in shipped.evaluations(0):
        config_of(stage)


def test_iterative_dpo_and_grpo_sample_and_train_on_as_much(monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = {}
    for stage in read_sweep(str(RECIPES / "iterative" / "demo.yaml")).training(0):
        config = config_of(stage)
        runs[stage.output_dir.name] = runs.get(stage.output_dir.name, config)
    grpo, once, rounds = runs["grpo"], runs["once"], [runs[f"round_{i}"] for i in (1, 2, 3)]
    sampled = grpo.max_steps * grpo.batch_size * grpo.num_candidates
    for run, share in ((once, 1), *((run, 3) for run in rounds)):
        pairs = runs[Path(run.dataset_name).name]
        prompts = load_rows(pairs, "synthetic", pairs.dataset_train_split, "prompts")
        assert len(prompts) * pairs.num_candidates == sampled / share
        assert pairs.model_name_or_path == run.model_name_or_path
        assert pairs.num_generations == grpo.num_generations
        assert 2 * run.batch_size == grpo.batch_size * grpo.num_generations
        assert run.learning_rate == grpo.learning_rate
    assert once.max_steps == sum(run.max_steps for run in rounds) == grpo.max_steps


@pytest.mark.usefixtures("few_resamples")
def test_a_small_sweep_of_real_runs(tmp_path, monkeypatch):
    """Two steps, one seed: every number comes out of a run, and a second call makes none."""
    (tmp_path / "assets").symlink_to(ROOT / "assets", target_is_directory=True)
    recipes = "assets/recipes/demo"
    tiny_run = {"max_steps": 2, "batch_size": 2, "num_train_rows": 4, "num_eval_rows": 4}
    start = {"model_name_or_path": "{sft}/model"}
    contents = {
        "seeds": [3],
        "output_dir": "sweep",
        "base": {
            "sft": {"script": "train_sft.py", "config": f"{recipes}/sft.yaml", "flags": tiny_run},
            "dpo": {
                "script": "train_dpo.py",
                "config": f"{recipes}/dpo.yaml",
                "flags": tiny_run | start,
                "outcomes": ["gold_reward", "kl", "reward_margin"],
            },
        },
        "evaluation": {
            "config": f"{recipes}/evaluate.yaml",
            "reference": "sft",
            "flags": {"num_prompts": 4, "num_eval_rows": 4},
        },
        "variants": [
            {"detail": "beta", "choice": 9.0, "stage": "dpo", "flags": {"beta": 9.0}},
            {"detail": "nothing", "choice": "as it was", "stage": "dpo", "flags": {"beta": 0.2}},
        ],
    }
    monkeypatch.setattr(stages, "run", run_here)
    with tiny.working_directory(tmp_path):
        sweep.main(["--config", write(tmp_path, contents)])
        again = (tmp_path / "sweep" / "sweep.json").read_bytes()
        monkeypatch.setattr(stages, "run", pytest.fail)
        sweep.main(["--config", write(tmp_path, contents)])
    assert (tmp_path / "sweep" / "sweep.json").read_bytes() == again
    effects = json.loads(again)["effects"]
    same = [e["difference"]["mean"] for e in effects if e["detail"] == "nothing"]
    assert same == [0, 0, 0], "the same flags and seed are the same run"
    assert all(
        e["by_seed"] != e["base_by_seed"]
        for e in effects
        if e["outcome"] == "reward_margin" and e["detail"] == "beta"
    )


# ---- the bugs that are re-enacted ----------------------------------------------------------------


def test_without_position_ids_left_padding_changes_scores_and_not_what_is_sampled(monkeypatch):
    """As in TRL."""
    monkeypatch.setattr(batching, "position_ids", batching.position_ids)  # put back afterwards
    model = Policy(tiny.causal_lm("gpt2", is_plain=True))
    prompts, completions = [[3, 4, 5]], [[[6, 7, 8]]]
    longer = [[3, 4, 5], [9] * 8], [[[6, 7, 8]], [[6]]]

    def scores() -> tuple[float, float]:
        alone = batching.padded_batch(prompts, completions, 1)
        padded = batching.padded_batch(*longer, 1)
        with torch.no_grad():
            return float(sequence_scores(model, alone)), float(sequence_scores(model, padded)[0])

    alone, padded = scores()
    assert padded == pytest.approx(alone, abs=1e-4)
    runpy.run_path(str(ABLATIONS / "bugs" / "no_position_ids.py"))
    still_alone, padded = scores()
    assert still_alone == pytest.approx(alone, abs=1e-4)
    assert abs(padded - alone) > 0.1
    with torch.no_grad():
        alone, padded = (
            decode.CopyingDecoder(model.lm, ids, 1, pad_id=1).logits[0]
            for ids in (prompts, longer[0])
        )
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-4)


def test_the_origin_normalises_first_and_so_looks_at_few_of_its_candidates(monkeypatch):
    """8 of 64 at temperature 2: the first 23 or so are looked at, and lie 0.5 above the mean."""
    raw = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).double()
    paths = {"model_name_or_path": "m", "output_dir": "o", "reward_funcs": ["gold"]}
    config = GRPOConfig(**paths, missing_eos_penalty=-1.0)
    seen, scored = [], make_dataclass("Scored", ["total"])  # what rewards are returned in

    def given(scorer, examples, drawn, config, *_):
        seen.append(config.penalize_missing_eos)
        return scored(scorer)

    monkeypatch.setattr(rollouts, "reward", given)
    runpy.run_path(str(RECIPES / "origin" / "normalised_first.py"))
    drawn = SimpleNamespace(has_stop=torch.ones(400 * 64, dtype=torch.bool))
    drawn.has_stop[5] = False
    rewards = rollouts.reward(7 * raw + 3, None, drawn, config, 0, 1).total
    target = (raw - raw.mean(1, keepdim=True)) / raw.std(1, keepdim=True)
    target[0, 5] = -1
    torch.testing.assert_close(rewards, target, atol=1e-3, rtol=0)  # whatever the model's scale is
    drawn.has_stop = drawn.has_stop[:400]
    found_once = rollouts.reward(raw[:, :1], None, drawn, config, 0, 1).total
    assert found_once[5] == -1
    assert torch.equal(found_once[6:], raw[6:, :1]), "an evaluation's completions have no group"
    assert seen == [False, False], "the penalty is not normalised"
    options = {"num_keep": 8, "temperature": 2.0, "method": "rso"}
    seeds = torch.arange(400)
    kept = advantages.rejection_sample(rewards, **options, seed=seeds)
    looked_at = 1 + kept.max(1).values.double().mean()
    assert looked_at == pytest.approx(23, abs=1.5)
    assert rewards.gather(1, kept).mean() == pytest.approx(0.5, abs=0.05)


def test_dropout_acts_where_a_gradient_is_wanted(monkeypatch):
    monkeypatch.setattr(RewardModel, "forward", RewardModel.forward)  # put back afterwards
    runpy.run_path(str(ABLATIONS / "dropout.py"))
    model = RewardModel(tiny.classifier("gpt2", is_plain=True))
    batch = tiny.batch_of([[3, 4, 5]] * 2, [[6, 7, 8]] * 2, side="right")

    def rewards() -> list[float]:
        return model(batch).tolist()

    noisy = [*rewards(), *rewards()]
    assert len(set(noisy)) == 4, "every row and forward has noise of its own"
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Dropout)]
    assert len(layers) == 1 + 2 * 3  # of the embeddings; of each block attention, and two residuals
    assert {layer.p for layer in layers} == {0.1}
    assert all(block.attn.training for block in fsdp.blocks(model))
    with torch.no_grad():
        quiet, again = rewards(), rewards()
    assert quiet == again
    assert quiet[0] == pytest.approx(quiet[1])
    assert quiet[0] not in noisy


def heads_after_a_step() -> dict:
    """On each rank, with the patch: the head before and after a step, and the trunk after it."""
    runpy.run_path(str(ABLATIONS / "bugs" / "head_outside_sharding.py"))
    config = tiny.train_config(layout="padded", learning_rate=0.1, lr_scheduler_type="constant")
    torch.manual_seed(0)
    lm_config = tiny.model_config("gpt2", num_labels=1, pad_token_id=7)
    lm = AutoModelForSequenceClassification.from_config(lm_config)
    model = fsdp.shard(RewardModel(lm), config, distributed.mesh(), float32_modules=[lm.score])
    before = lm.score.weight.detach().float().flatten().tolist()
    optimizer = optim.build_optimizer(model, config)
    token = 3 + distributed.rank()  # the ranks see other rows
    batch = tiny.batch_of([[token] * 4], [[token, 9]], side="right")
    model(batch).sum().backward()
    optim.clip_and_step(optimizer, config, 0, 1)
    return {
        "dtype": str(lm.score.weight.dtype),
        "before": before,
        "after": lm.score.weight.detach().float().flatten().tolist(),
        "trunk": ranks.state_hashes(model.lm.transformer),
    }


def test_the_head_outside_of_sharding_differs_between_ranks(tmp_path):
    first, second = ranks.launch(heads_after_a_step, 2, tmp_path)
    assert first["dtype"] == "torch.bfloat16"
    assert first["before"] != second["before"]
    assert first["after"] != first["before"]
    assert first["after"] != second["after"]
    assert first["trunk"] == second["trunk"], "the trunk is trained as one, under two heads"
