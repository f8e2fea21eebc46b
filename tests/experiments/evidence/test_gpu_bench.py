"""Claim: the benchmark of one GPU keeps what it measured, whatever fails, and reads it right.

Tried on a CPU by a small model, with a stand-in for TRL's processes. No GPU has run it. About
`experiments.evidence.bench.gpu`.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from common.record.jsonl import read_jsonl
from experiments.evidence.bench.gpu import __main__ as gpu
from experiments.evidence.bench.gpu import attention
from experiments.evidence.bench.rows import EVERY_ROW, SHAPES, Shape
from experiments.evidence.records.studies import cells

MINI = Shape(num_layers=2, width=64, num_heads=2, vocabulary=1024, num_positions=512)
TRL_LINES = {
    "sft": [{"variant": "2 rows", "step_seconds": [9.0, 2.0]}, {"variant": "4 rows", "error": "a"}],
    "grpo": [{"variant": "4 rows", "step_seconds": [9.0, 4.0], "completion_length": 30.0}],
}


def stand_in_for_trl(words: list[str], log: Path, **options: Any) -> None:
    """Write the lines of a stage; GRPO's does not come to its end."""
    flags = dict(word.split("=") for word in words if "=" in word)
    stage = flags["--row"].removeprefix("tiny-")
    lines = [{"loss": 8.0, "grad_norm": 1.0, "peak_gb": 3.0} | line for line in TRL_LINES[stage]]
    Path(flags["--output"]).write_text("".join(json.dumps(x) + "\n" for x in lines))
    if stage == "grpo":
        raise RuntimeError("out of memory")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with these flags, on two stages: its lines."""
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu, "KINDS", ("sft", "grpo"))
    monkeypatch.setattr(gpu.processes, "run", stand_in_for_trl)
    monkeypatch.setitem(SHAPES, "tiny", MINI)

    def call(*flags: str) -> list[dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["gpu", "--tiny", *flags])
        gpu.main()
        return read_jsonl(tmp_path / "tiny" / "results.jsonl")

    return call


def test_every_case_leaves_its_line_and_the_table_has_the_fastest(run, capsys):
    lines = run("--parts", "check", "ours", "trl")
    cases = gpu.plan(
        ["tiny"], ["check", "ours", "trl"], [EVERY_ROW["tiny-sft"], EVERY_ROW["tiny-grpo"]]
    )
    assert list(dict.fromkeys(line["case"] for line in lines)) == [case.name for case in cases]
    by_case = {line["case"]: line for line in lines}
    assert by_case["check-bfloat16"]["is_right"]
    assert 0 < by_case["check-float32"]["groups of 8, tails"] < 1e-5
    reference, plain = (by_case[f"ours-tiny-sft-{x}"] for x in ("float32-padded", "plain"))
    assert plain["loss_difference"] == plain["loss"] - reference["loss"] != 0
    assert plain["loss_difference"] == pytest.approx(0, abs=1e-2)
    row = EVERY_ROW["tiny-sft"]
    assert len(plain["wall_seconds"]) == row.steps + 1
    assert plain["seconds"] == median(plain["wall_seconds"][row.warmup : row.steps])
    assert plain["kernels"]["matmul"][1] > 10
    assert plain["python_calls"] > 1000
    assert by_case["ours-tiny-sft-compiled"]["compiled"][0] > 0
    assert by_case["ours-tiny-grpo-plain"]["sampler_kl"] == pytest.approx(0, abs=1e-2)
    trl, failed = (line for line in lines if line["case"] == "trl-tiny-sft")
    assert (trl["seconds"], failed["error"]) == (2.0, "a")
    assert trl["per_second"] * 2.0 == pytest.approx(plain["per_second"] * plain["seconds"])
    assert [line.get("error") for line in lines[-2:]] == [None, "RuntimeError: out of memory"]
    timed = [x for x in lines if x["case"].startswith("ours-tiny-sft") and "per_second" in x]
    speeds = [trl["per_second"], max(x["per_second"] for x in timed)]
    _, sft, _ = cells(capsys.readouterr().out)
    shown = [f"{speed:,.4g}" for speed in speeds]
    assert sft[:5] == ["tiny", "sft, tokens/s", *shown, f"{speeds[1] / speeds[0]:.1f}"]
    assert len(run("--parts", "check", "ours", "trl", "--resume")) == len(lines) + 1  # the fixture


def test_a_case_without_time_is_skipped_and_made_later(run):
    lines = run("--parts", "check", "--minutes", "0")
    assert [line["part"] for line in lines] == ["card", "check", "check"]
    assert all("are left" in line["skipped"] for line in lines)
    later = run("--parts", "check", "--resume")[3:]
    assert [line["part"] for line in later] == ["card", "check", "check"]
    assert not any("skipped" in line for line in later)


def test_a_wrong_kernel_and_one_that_fails_are_reported(run, monkeypatch):
    def wrong(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if query.dtype == torch.float32:
            raise RuntimeError("no kernel")
        return query * (key.sum() + value.sum()) * torch.nan

    monkeypatch.setattr(attention, "branch_attention", wrong)
    _, half, single = run("--parts", "check")
    assert (half["pairs"], half["is_right"]) == (None, False)
    assert single["error"] == "RuntimeError: no kernel"


def test_a_lost_gpu_is_left_by_a_new_process(run, monkeypatch):
    calls: list[list[str]] = []

    def lost(*_: Any) -> None:
        monkeypatch.setattr(gpu, "timer", lost)
        raise RuntimeError("an illegal memory access was encountered")

    def replace(_: str, words: list[str]) -> None:
        calls.append(words)
        raise SystemExit

    monkeypatch.setattr(gpu, "attention_difference", lost)
    monkeypatch.setattr(gpu.os, "execv", replace)
    with pytest.raises(SystemExit):
        run("--parts", "check")
    torch.distributed.destroy_process_group()
    assert calls[0][1:6] == ["-m", "experiments.evidence.bench.gpu", "--tiny", "--parts", "check"]
    assert calls[0][6] == "--resume"


def test_trl_is_tuned_at_the_fastest_micro_batch(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from experiments.evidence.bench import trl_stages

    def train(row: Any, fixture: Path, steps: int, seed: int, size: int, **settings: Any) -> Any:
        if size == 64:
            raise RuntimeError("CUDA out of memory. Tried")
        return {"step_seconds": [9.0, 9.0, 16.0 / size]} | settings

    monkeypatch.setattr(trl_stages, "train", train)
    words = ["--row=gpu-sft", "--fixture=x", "--steps=3", f"--output={tmp_path / 'a.jsonl'}"]
    words += ["--sizes", "16", "32", "64", "--extras", "use_liger_kernel", "torch_compile"]
    monkeypatch.setattr("sys.argv", ["trl_stages", *words])
    trl_stages.main()
    lines = read_jsonl(tmp_path / "a.jsonl")
    variants = ["16 rows", "32 rows", "64 rows", "32 rows, torch_compile"]
    assert [line["variant"] for line in lines] == variants
    assert lines[2]["error"] == "CUDA out of memory"
    assert lines[3]["torch_compile"]
