"""Claim: the benchmark measures what it says it does.

Texts have the lengths that were drawn and the same tokens apart as joined; the fixture follows
from its seed; samples stop with the probability asked for; FLOP floors and bytes are those of
hand-worked cases and of PyTorch's own counter; figures leave the warm-up out. The comparison of
both chains says what was measured, and our commands are those of the recipes. About
`experiments.evidence.bench`.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2LMHeadModel

from assets.recipes.bench import quality
from common.config.parser import parse
from common.evaluation.accuracy import Interval, PreferenceAccuracy
from common.evaluation.results import GenerationSummary, System
from common.record.flops import group_flops
from common.text.data_report import describe
from common.text.reading import load_rows
from common.text.schemas import Row
from common.text.tokenise import tokenize_rows
from experiments.evidence.bench import __main__ as bench
from experiments.evidence.bench import fixture, flops, processes, sampler, sides
from experiments.evidence.bench.fixture import EOS_ID
from experiments.evidence.bench.rows import ROWS, SHAPES, BenchRow, Shape
from experiments.runs.stages import config_class

MINI = Shape(num_layers=2, width=64, num_heads=2, vocabulary=1024, num_positions=512)
TOY = Shape(num_layers=1, width=2, num_heads=1, vocabulary=10, num_positions=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    SHAPES["mini"] = MINI
    folder = tmp_path_factory.mktemp("bench") / "fixture"
    fixture.build("mini", folder)
    yield folder
    del SHAPES["mini"]


def test_lengths_are_those_of_the_distribution():
    lengths = fixture.stratified_lengths(NormalDist(267, 80), 32, 384, 1000, random.Random(0))
    assert max(lengths) == 384
    assert min(lengths) >= 32
    unclipped = fixture.stratified_lengths(NormalDist(267, 80), -999, 999, 1000, random.Random(0))
    assert mean(unclipped) == pytest.approx(267, abs=0.1)
    assert stdev(unclipped) == pytest.approx(80, abs=0.5)
    assert fixture.stratified_lengths(NormalDist(267, 80), 32, 384, 1, random.Random(0)) == [267]


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_our_stages_see_every_text_whole(folder: Path, row: BenchRow):
    path = folder / "data" / f"{row.data_name}.jsonl"
    recorded = json.loads((folder / "fixture.json").read_text())["lengths"][row.data_name]
    config = tiny.train_config(max_prompt_length=384, max_dropped_fraction=0.0)
    raw_rows = load_rows(config, str(path), "train", row.kind)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    texts = [Row.of_text(raw, row.kind) for raw in raw_rows]
    vocabulary = tiny.vocabulary([EOS_ID], tokenizer, pad_id=EOS_ID)
    tokenised = tokenize_rows(texts, vocabulary, config)
    report = describe(tokenised, "train")
    counts = f"{row.num_rows} of {row.num_rows} rows, truncated 0 prompts and 0 completions"
    assert report.startswith(f"train: {counts}\n")
    examples = [row.example for row in tokenised]
    assert len(examples) == row.num_rows
    columns = [name for name in ("completion", "chosen", "rejected") if name in recorded]
    assert [len(e.prompt_ids) for e in examples] == recorded["prompt"]
    for k, column in enumerate(columns):
        assert [len(e.completions[k]) for e in examples] == recorded[column]
        assert all(e.completions[k][-1] == EOS_ID for e in examples)


def test_the_fixture_is_a_function_of_its_seed(folder: Path):
    words, tokenizer = fixture.words_of(MINI), AutoTokenizer.from_pretrained(folder / "policy")
    ids = [*range(2, MINI.vocabulary)]
    assert tokenizer("".join(words))["input_ids"] == ids
    assert tokenizer.decode(ids) == "".join(words)
    assert tokenizer(f" w5{fixture.EOS}")["input_ids"] == [5, EOS_ID]
    rows = fixture.make_rows("preference", 8, words, 0)
    saved_rows = (folder / "data" / "preference-8.jsonl").read_text().splitlines()
    assert rows == [json.loads(line) for line in saved_rows]
    assert rows != fixture.make_rows("preference", 8, words, 1)
    first, second = (fixture.make_policy(MINI, [[5] * 60], 3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_samples_stop_as_often_as_asked(folder: Path):
    model = GPT2LMHeadModel.from_pretrained(folder / "policy").eval()
    prompt = torch.randint(2, MINI.vocabulary, (1, 100), generator=torch.manual_seed(0))
    torch.manual_seed(0)
    tokens = model.generate(
        prompt.expand(256, -1),
        attention_mask=torch.ones(256, 100, dtype=torch.long),
        do_sample=True,
        top_k=0,
        max_new_tokens=56,
    )[:, 100:]
    stops = (tokens == EOS_ID).any(-1)
    sampled = (tokens == EOS_ID).cumsum(-1).sub(tokens.eq(EOS_ID).long()).eq(0).sum()
    assert stops.sum() / sampled == pytest.approx(1 / 50, rel=0.25)


def test_a_forward_costs_what_is_worked_out_by_hand():
    # 3 tokens of prompt, 2 of completion; 1 layer, width 2, vocabulary 10.
    # The layer is the last: two tokens of the prompt give keys and values only.
    linear = 2 * 2 * (2 * 4)  # 2 m k n: keys and values of two tokens
    linear += 2 * 3 * (2 * 6 + 2 * 2 + 2 * 8 + 8 * 2)  # qkv, output, up, down of three
    pairs = 3 + (4 + 5)  # keys that each query sees
    attention = pairs * (2 * 2 + 2 * 2)
    head = 2 * 2 * 2 * 10
    expected = linear + attention + head
    assert group_flops(flops.decoder(TOY), 3, [2]) == expected == 496
    # A second completion sees the prompt, not the first one.
    more = 2 * 2 * 48 + (4 + 5) * 8 + head
    assert group_flops(flops.decoder(TOY), 3, [2, 2]) == expected + more


def test_linear_layers_cost_what_pytorch_counts():
    model = GPT2LMHeadModel(fixture.model_config(MINI)).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 7, dtype=torch.long), logits_to_keep=3)
    counted = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in counted.items() if "mm" in str(op) and "bmm" not in str(op))
    assert linear == flops.decoder(MINI).flops(7, 0, 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sft", 3 * 496),
        ("reward", 3 * (416 + 264)),  # no vocabulary head
        ("dpo-precomputed", 3 * (496 + 344)),
        ("grpo-1x8", 5 * (496 + 7 * 344)),
    ],
)
def test_a_step_costs_its_passes(name: str, expected: int):
    columns = {"sft": ["completion"], "preference": ["chosen", "rejected"], "prompts": []}
    lengths = {"prompt": [3]} | {column: [2] for column in columns[ROWS[name].kind]}
    row = argparse.Namespace(**{**vars(ROWS[name]), "num_rows": 1, "kind": ROWS[name].kind})
    assert flops.step_flops(row, TOY, lengths, completion_length=2) == expected


def test_units_count_tokens_pairs_and_rollouts():
    assert flops.step_units(ROWS["sft"], {"prompt": [3, 4], "completion": [1, 2]}) == 10
    assert flops.step_units(ROWS["dpo-precomputed"], {}) == 8
    assert flops.step_units(ROWS["grpo-8x8"], {}) == 64


def test_figures_leave_the_warm_up_out_and_first_steps_are_compared():
    row = ROWS["dpo-precomputed"]  # 8 pairs per step, 2 steps of warm-up
    seconds = {"trl": [[90, 90, 4, 2, 2], [90, 90, 4, 4, 4]], "ours": [[90, 90, 1, 1, 8]] * 2}
    norms, runs = {"trl": 2.0, "ours": 2.5}, []
    for side, both in seconds.items():
        for number, steps in enumerate(both, 1):
            run = {"row": row.name, "side": side, "loss": 0.5, "grad_norm": norms[side]}
            runs.append(run | {"step_seconds": steps, "peak_mb": 100.0 * number})
    results = {"model": "tiny", "runs": runs}
    lengths = {name: [10] * 8 for name in ("prompt", "chosen", "rejected")}
    stamp = {"lengths": {row.data_name: lengths}}
    (line,) = bench.summarise(results, argparse.Namespace(stages=["dpo-precomputed"]), stamp)
    assert line["trl"]["by_round"] == [4, 2]
    assert line["trl"]["speed"] == pytest.approx(8 / 3)
    assert line["ratio_by_round"] == [2, 4]
    assert line["ratio"] == pytest.approx(3)
    assert line["ours"]["peak_mb"] == 150
    assert line["difference"] == pytest.approx(0.25)


def test_a_run_starts_in_an_empty_folder_and_is_read(tmp_path, monkeypatch):
    started: list[list[str]] = []

    def start(words: list[str], log: Path, *, threads: int) -> float:
        assert [*tmp_path.iterdir()] == []
        started.append(words)
        lines = [{"step_seconds": x, "loss": x, "grad_norm": 3.0} for x in (1.0, 1.5)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        return 5.0

    (tmp_path / "of an earlier command").touch()
    monkeypatch.setattr(processes, "run", start)
    result = sides.run("ours", ROWS["sft"], Path("x"), 2, tmp_path, threads=1, seed=0)
    assert started.pop()[-2:] == ["--bf16", "False"]
    first = {"loss": 1.0, "grad_norm": 3.0}
    assert result == first | {"step_seconds": [1.0, 1.5], "peak_mb": 5.0}


def test_both_sides_of_a_row_compute_in_bfloat16_or_neither(tmp_path, monkeypatch):
    started: list[list[str]] = []

    def start(words: list[str], log: Path, *, threads: int) -> float:
        started.append(words)
        (tmp_path / "run/metrics.jsonl").write_text('{"step_seconds": [1.0]}\n')
        return 5.0

    monkeypatch.setattr(processes, "run", start)
    for bf16 in (False, True):
        for side in sides.SIDES:
            sides.run(
                side, ROWS["sft"], tmp_path, 2, tmp_path / "run", threads=1, seed=0, bf16=bf16
            )
    plain, _, fast, ours = started
    assert fast == [*plain, "--bf16"]
    assert ours[-2:] == ["--bf16", "True"]
    parsed = bench.parse_arguments(["--bf16"]), bench.parse_arguments([])
    assert [bench.folder_of(each).name for each in parsed] == ["tiny-bf16", "tiny"]


def system(gold: float, kl: float = 0.5) -> System:
    every = Interval(1.0, None, None)
    kls = GenerationSummary(8.0, every, 1.0, every, None, 1.0, kl=Interval(kl, None, None))
    mean = Interval(gold, None, None)
    return System("", "policy", "", generations=kls, gold_reward=mean)


RUNS = {
    "sft": {"minutes": 2.0, "GB": 0.5, "saved": {}},
    "reward": {"minutes": 3.0, "GB": 0.5, "saved": {}},
    "dpo": {"minutes": 1.0, "GB": 0.5, "saved": {"a": 0.4, "b": 0.8}},
    "grpo": {"minutes": 4.0, "GB": 0.5, "saved": {"c": 1.0, "d": 2.0, "e": 3.0}},
}
JUDGED = {
    "x/sft": system(0.7),
    "x/reward": System("", "reward_model", "", accuracy=PreferenceAccuracy(0.8, 0.7, 0.9, 9, 0)),
    "x/dpo": system(0.85),
    "x/grpo": system(0.95, 3.0),
    **{"a": system(0.8), "b": system(0.89)},
    **{"c": system(0.7), "d": system(0.9), "e": system(0.93)},
}


def test_outcomes_of_a_chain():
    outcomes = {name: quality.outcomes(name, Path("x"), RUNS, JUDGED) for name in quality.STAGES}
    assert outcomes["sft"] == {"minutes": 2.0, "GB": 0.5, "gold reward": 0.7}
    assert outcomes["reward"] == {"minutes": 3.0, "GB": 0.5, "accuracy, %": 80.0}
    assert outcomes["dpo"] == {"minutes": 1.0, "GB": 0.5, "gold reward": 0.85, "KL, nats": 0.5}
    # SFT, the reward model, and GRPO to its second checkpoint
    assert outcomes["grpo"].pop(quality.UNTIL) == 2.0 + 3.0 + 2.0
    assert outcomes["grpo"] == {"minutes": 4.0, "GB": 0.5, "gold reward": 0.95, "KL, nats": 3.0}


def test_table_has_means_and_differences_by_seed():
    def chain(gold: float, until: float | None) -> dict[str, dict[str, float]]:
        reached = {} if until is None else {quality.UNTIL: until}
        return {stage: {} for stage in quality.STAGES} | {"dpo": {"gold reward": gold, **reached}}

    text = quality.table(
        {
            "seeds": [0, 1, 2],
            "packages": {"trl": "1.16.0"},
            "trl": [chain(0.7, None), chain(0.8, 9), chain(0.9, 7)],
            "ours": [chain(0.9, 5), chain(0.9, 4), chain(0.9, 3)],
        }
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["stage", "", "TRL 1.16.0", "ours", "ours - TRL"]
    # Student's quantile of two degrees of freedom is 4.303
    half = 4.303 * 0.1 / 3**0.5
    interval = f"[{0.8 - half:.3f}, {0.8 + half:.3f}]"
    assert rows[2][:4] == ["dpo", "gold reward", f"0.800 {interval}", "0.900"]
    assert rows[2][4].startswith("+0.100 [")
    assert rows[3][1] == quality.UNTIL
    assert rows[3][2].startswith("8.00 [")
    assert rows[3][2].endswith("(2 of 3 seeds)")
    assert rows[3][4].startswith("-4.50")
    assert len(rows) == 4


def test_a_seed_is_made_anew_for_other_steps_and_on_another_commit(tmp_path, monkeypatch):
    starts, commit = [], ["a"]
    values = {"sft": {"gold reward": 0.7, "minutes": 1.0}}

    def start(words: list[str], log: Path, *, threads: int) -> None:
        starts.append(words)
        assert not (log.parent / "left").exists()
        log.parent.mkdir(parents=True)
        (log.parent / "left").write_text("of an earlier command")

    monkeypatch.setattr(quality, "FOLDER", tmp_path)
    monkeypatch.setattr(quality, "chain", lambda *_: None)
    monkeypatch.setattr(quality, "judged", lambda _: values)
    monkeypatch.setattr(quality.processes, "run", start)
    monkeypatch.setattr(quality, "git_commit", lambda: commit[0])
    monkeypatch.setattr(quality.metadata, "version", lambda name: "1")
    expected = 0
    for now, flags, is_new in (
        *(("a", ["--max_steps=4"], True), ("a", ["--max_steps=4"], False)),
        *(("a", [], True), ("a", [], False), ("b", [], True)),
        *(("b-dirty", [], True), ("b-dirty", [], True)),
    ):
        commit[0], expected = now, expected + is_new
        monkeypatch.setattr("sys.argv", ["quality", "--seeds=5", *flags])
        quality.main()
        assert len(starts) == expected


@pytest.mark.parametrize("stage", quality.STAGES)
def test_our_commands_are_those_of_the_recipe_on_the_given_rows(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(processes.REPOSITORY)
    folder = tmp_path / "ours"
    for name in ("model", "ours/sft/model", "ours/reward/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / f"{stage}.jsonl").write_text("{}\n")
    script, *flags = quality.command("ours", stage, folder, 3, 0)
    config = parse(config_class(script), flags)
    recipe = parse(
        config_class(script), ["--config", f"{quality.RECIPES}/{stage}.yaml", "--seed", "3"]
    )
    assert config.dataset_name == str(tmp_path / f"{stage}.jsonl")
    assert config.model_name_or_path == str(
        tmp_path / ("model" if stage == "sft" else "ours/sft/model")
    )
    for name in ("batch_size", "learning_rate", "max_steps", "warmup_steps", "seed"):
        assert getattr(config, name) == getattr(recipe, name)
    _, _, trl_stage, *trl_flags = quality.command("trl", stage, folder, 3, 5)
    assert trl_stage == stage
    assert "--max_steps=5" in trl_flags


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both chains begin with, of few rows, and a reward model of random weights."""
    pytest.importorskip("trl")  # not there before Python 3.11
    from assets.recipes.bench import trl_chain

    folder = tmp_path_factory.mktemp("start")
    flags = [f"--config={quality.RECIPES}/sft.yaml", f"--output_dir={folder}"]
    with mock.patch.object(trl_chain, "load_rows", lambda *words: load_rows(*words[:-1], 16)):
        trl_chain.make_start(trl_chain.read_config("sft", flags))
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    for part in (judge, AutoTokenizer.from_pretrained(folder / "model")):
        part.save_pretrained(folder / "trl" / "reward" / "model")
    return folder


@pytest.fixture
def forgets_ranks(process_group: None):
    """Accelerate keeps what it has seen of the process group; other tests of TRL have none."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


RANKS_OF_ONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.usefixtures("forgets_ranks")
@pytest.mark.parametrize("stage", [*quality.STAGES, quality.WITH_STOP])
def test_trl_trains_every_stage_by_its_command(stage: str, start: Path, monkeypatch: Any):
    """What a recipe leaves to a default of ours is a value that TRL takes."""
    from assets.recipes.bench import trl_chain

    _, _, name, *flags = quality.command("trl", stage, start / "trl", 0, 1)
    with_stop = "--with_stop" in flags
    flags = [flag for flag in flags if flag != "--with_stop"]
    rows = trl_chain.MICRO_BATCH_SIZE[name] // (8 if name == "grpo" else 1)
    flags += [f"--model_name_or_path={start / 'model'}", f"--batch_size={rows}", "--save_steps=0"]
    for variable, value in RANKS_OF_ONE.items():
        monkeypatch.setenv(variable, value)
    config = trl_chain.read_config(name, flags)
    trainer = trl_chain.make_trainer(name, config, with_stop=with_stop)
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_sampler_draws_every_token_that_is_timed(tmp_path: Path) -> None:
    with mock.patch.object(sampler, "SHAPE", Shape(2, 18, 9, 64, 256)):
        sampler.build(tmp_path)
    draw = sampler.ours(tmp_path, "float32")
    assert draw([[2, 3, 4], [5, 6]], 3, 0) == 2 * 3 * sampler.COMPLETION_LENGTH  # none stops


def test_our_sampler_is_compared_with_the_faster_engine() -> None:
    speeds = {"ours": [30.0, 60.0, 40.0], "vLLM": [10.0, 20.0, 15.0], "vLLM compiled": [20.0] * 3}
    line = sampler.summarise({"row": "1x8", "dtype": "float32", **speeds})
    assert line["ratio"] == 40 / 20
    assert line["ratios"] == [1.5, 3.0, 2.0]
    machine = {"cpu": "a CPU", "cores": 2, "versions": {"torch": "2"}}
    table = sampler.render({"rows": [line], "machine": machine})
    assert "2.00 (1.50..3.00)" in table
