"""Claim: `--compile true` trains the same model, and no batch is compiled anew.

Every kind of block, with and without gradient, is compiled once; lengths vary without it. What is
traced runs as it is, but for one run of a step, which is compiled to C++. About
`common.model.fsdp`.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import train_grpo
import train_sft
from common.config.grpo import GRPOConfig
from common.config.stages import SFTConfig
from common.record.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("process_group", "without_pictures")
GRPO: dict[str, Any] = {"reward_funcs": ["gold"], "num_candidates": 4, "num_generations": 4}
GRPO |= {"beta": 0.1, "penalize_missing_eos": False}
ONE_STEP = {"max_steps": 1, "self_check": False, "dataset_test_split": ""}
ONE_STEP |= {"num_sample_prompts": 0, "micro_batch_size": 4, "compile": "reduce-overhead"}
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.parametrize(
    ("main", "config", "more", "backend"),
    [
        (train_grpo.main, GRPOConfig, GRPO, "eager"),
        (train_grpo.main, GRPOConfig, GRPO | {"layout": "padded"}, "eager"),
        pytest.param(train_sft.main, SFTConfig, ONE_STEP, "inductor", marks=NEEDS_COMPILER),
    ],
    ids=["grpo", "grpo padded", "sft in C++"],
)
def test_a_compiled_run_equals_a_plain_one_and_compiles_each_kind_of_block_once(
    main: Any, config: Any, more: dict[str, Any], backend: str, tmp_path: Path, monkeypatch: Any
):
    # What inductor kept may be of other instructions of a CPU, which its key does not name
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    shape = {"model_type": "gpt2", "n_layer": 10, "n_embd": 32, "n_head": 2, "n_positions": 128}
    (tmp_path / "deep.json").write_text(json.dumps(shape))
    compiled = functools.partial(torch.compile, backend=backend)
    series = {}
    for is_compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        folder = tmp_path / str(is_compiled)
        flags = {"dataset_name": "synthetic", "max_prompt_length": 96, "max_completion_length": 16}
        flags |= {"model_name_or_path": str(tmp_path / "deep.json"), "output_dir": str(folder)}
        flags |= {"tokenizer_name_or_path": "synthetic", "batch_size": 4, "micro_batch_size": 2}
        flags |= {"num_train_rows": 32, "num_eval_rows": 8, "max_steps": 3, "logging_steps": 1}
        flags |= more | {"learning_rate": 1e-3}
        flags["compile"] = more.get("compile", "true") if is_compiled else "false"
        with (
            mock.patch.object(torch, "compile", compiled),
            mock.patch.object(torch._dynamo.config, "fail_on_recompile_limit_hit", True),
        ):
            main(config(**flags))
        lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "loss" in line]
        series[is_compiled] = [line[name] for line in lines for name in ("loss", "grad_norm")]
    assert series[True] == pytest.approx(series[False], rel=1e-4, abs=1e-5)
    assert 0 < counters["stats"]["unique_graphs"] <= 40
    if more.get("layout") != "padded":
        assert not counters["graph_break"]
