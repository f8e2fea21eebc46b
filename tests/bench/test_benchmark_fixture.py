"""Claim: the benchmark measures what it says it does.

Texts have the lengths that were drawn and the same tokens apart as joined; the fixture follows
from its seed; samples stop with the probability asked for; FLOP floors and bytes are those of
hand-worked cases and of PyTorch's own counter; figures leave the warm-up out.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import NormalDist, mean, stdev

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, GPT2LMHeadModel

from common.text.chat import render
from common.text.reading import load_rows
from common.text.tokenise import tokenize_rows
from experiments.bench import __main__ as bench
from experiments.bench import fixture, flops, our_stages
from experiments.bench.fixture import EOS_ID
from experiments.bench.rows import CHECKS, ROWS, SHAPES, BenchRow, Shape

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


@pytest.mark.parametrize("row", [*ROWS.values(), *CHECKS.values()], ids=lambda row: row.name)
def test_our_stages_see_every_text_whole(folder: Path, row: BenchRow):
    path = folder / "data" / f"{row.data_name}.jsonl"
    recorded = json.loads((folder / "fixture.json").read_text())["lengths"][row.data_name]
    config = tiny.train_config(max_prompt_length=384, max_dropped_fraction=0.0)
    raw_rows = load_rows(config, str(path), "train", row.kind)
    examples, report = tokenize_rows(
        [text for raw in raw_rows for text in render(raw, row.kind, None)],
        tiny.vocabulary([EOS_ID], AutoTokenizer.from_pretrained(folder / "policy"), pad_id=EOS_ID),
        config,
        "train",
    )
    lost = (report.num_prompts_truncated, report.num_completions_truncated, report.num_dropped)
    assert lost == (0, 0, 0)
    assert report.num_boundary_merges == 0
    assert len(examples) == row.num_rows
    columns = [name for name in ("completion", "chosen", "rejected") if name in recorded]
    assert [len(e.prompt_ids) for e in examples] == recorded["prompt"]
    for k, column in enumerate(columns):
        assert [len(e.completions[k]) for e in examples] == recorded[column]
        assert all(e.completions[k][-1] == EOS_ID for e in examples)


def test_the_fixture_is_a_function_of_its_seed(folder: Path):
    tokenizer = fixture.train_tokenizer(MINI, 0)
    saved = AutoTokenizer.from_pretrained(folder / "policy")
    assert tokenizer.get_vocab() == saved.get_vocab()
    words = fixture.single_token_words(tokenizer)
    assert all(len(tokenizer(word)["input_ids"]) == 1 for word in words)
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
    assert flops.group_flops(TOY, 3, [2], head=True) == expected == 496
    # A second completion sees the prompt, not the first one.
    more = 2 * 2 * 48 + (4 + 5) * 8 + head
    assert flops.group_flops(TOY, 3, [2, 2], head=True) == expected + more


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
        ("grpo-1x8-reward-model", 5 * (496 + 7 * 344) + 416 + 7 * 264),
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


def test_figures_leave_the_warm_up_out():
    row = ROWS["dpo-precomputed"]  # 8 pairs per step, 2 steps of warm-up
    seconds = {"trl": [[90, 90, 4, 2, 2], [90, 90, 4, 4, 4]], "ours": [[90, 90, 1, 1, 8]] * 2}
    runs = [
        {
            "row": "dpo-precomputed",
            "side": side,
            "round": i,
            "step_seconds": steps,
            "peak_mb": 100.0 * (i + 1),
        }
        for side, both in seconds.items()
        for i, steps in enumerate(both)
    ]
    results = {"model": "tiny", "ceiling": 1e9, "runs": runs}
    lengths = {name: [10] * 8 for name in ("prompt", "chosen", "rejected")}
    stamp = {"lengths": {row.data_name: lengths}}
    (line,) = bench.summarise(results, argparse.Namespace(stages=["dpo-precomputed"]), stamp)
    assert line["trl"]["by_round"] == [4, 2]
    assert line["trl"]["speed"] == pytest.approx(8 / 3)
    assert line["ratio_by_round"] == [2, 4]
    assert line["ratio"] == pytest.approx(3)
    assert line["ours"]["peak_mb"] == 150
    assert line["ours"]["ceiling_share"] == pytest.approx(line["ours"]["floor_flops"] / 1e9)


def test_every_row_has_a_command():
    for row in [*ROWS.values(), *CHECKS.values()]:
        command = our_stages.command(row, Path("fixture"), 3, Path("out"))
        assert command[0] == f"train_{row.stage}.py"
        assert (our_stages.processes.REPOSITORY / command[0]).exists()
        assert command[command.index("--max_steps") + 1] == "3"
