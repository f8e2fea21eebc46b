"""From one GPU to 64, by arithmetic: which flags, what a rank holds, how long a step takes.

Nothing here was measured. Memory is what `experiments.plan` plans for a GPU. A row has the first
line of `RUNGS` with which the plan is within `SHARE` of `MEMORY`, else the last one tried.
Gradients are added up whole where that fits, else sharded (`--shard_gradients`). Seconds are the
plan's operations at the two shares of `FLOPS` in `UTILISATION`; sampling is left out, as one token
at a time reaches no such share, and so are communication and optimiser.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from common.config.grpo import GRPOConfig
from common.config.stages import SFTConfig, TrainConfig
from common.record.terminal import markdown_table
from experiments.plan.memory import Moment, gigabytes, host_bytes, peak
from experiments.plan.work import FLOAT32, Run, make_run, micro_batch, step_flops

MEMORY = 80e9  # bytes of a GPU
SHARE = 0.9  # for what is planned; CUDA and NCCL take some, and gaps between allocations
FLOPS = 989e12  # of an H100 SXM, bfloat16, dense
UTILISATION = (0.5, 0.15)  # assumed: of large models, and what is published of small ones
STAGES: dict[str, type[TrainConfig]] = {"SFT": SFTConfig, "GRPO": GRPOConfig}
COMMON: dict[str, Any] = {
    "bf16": True,
    "batch_size": 512,
    "micro_batch_tokens": 4096,
    "max_prompt_length": 512,
    "max_completion_length": 56,
    "save_steps": 500,
    "num_sample_prompts": 0,  # or each rank holds a whole copy for the printed table of samples
}
RUNGS: list[dict[str, Any]] = [  # beside those; each is tried with whole and sharded gradients
    {},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "cpu_offload": True},
    {"gradient_checkpointing": True, "rollout_server": "http://HOST:8000"},
    {"gradient_checkpointing": True, "lora_r": 16},
]
# Of Llama 3.1
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 8192, "tie_word_embeddings": False}
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
MODELS: dict[str, dict[str, Any]] = {
    "124M": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12},
    "774M": {"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "8B": LLAMA | dict(zip(SIZES, (32, 4096, 14336, 32), strict=True)),
    "70B": LLAMA | dict(zip(SIZES, (80, 8192, 28672, 64), strict=True)),
}
RANKS = [1, 8, 64]


@cache
def run_of(stage: str, model: Path, lora_r: int = 0) -> Run:
    """A plan; GRPO has a reference and a reward model of the same size."""
    flags = COMMON | {"output_dir": "unused", "model_name_or_path": str(model), "lora_r": lora_r}
    if stage == "GRPO":
        flags |= {"reward_funcs": [str(model)], "num_generations": 8}
    return make_run(STAGES[stage](**flags), on_gpu=True)


def rungs(stage: str, model: Path) -> Iterator[tuple[str, Run]]:
    """Flags and the plan with them, one after the other: a model is counted when it is needed."""
    for flags in RUNGS:
        if "rollout_server" in flags and stage != "GRPO":
            continue
        run = run_of(stage, model, flags.get("lora_r", 0))
        named = " ".join(f"--{name} {str(value).lower()}" for name, value in flags.items())
        yield named, run.with_flags(**flags)


def fitting(tried: Iterable[tuple[str, Run]], ranks: int) -> tuple[str, Run, Moment]:
    """The first that fits, whole gradients before sharded ones, with its flags and its peak."""
    for flags, of_flags in tried:
        for is_sharded in (False, True):
            run = of_flags.with_flags(shard_gradients=is_sharded).on(ranks)
            most = peak(run)
            if most.total <= SHARE * MEMORY:
                return flags, run, most
    return f"does not fit with {flags}", run, most


def sent_bytes(run: Run) -> float:
    """Bytes that a rank sends in a step: a ring hands on S (R - 1) / R of S bytes on R ranks.

    The policy is gathered in the compute dtype for forward and backward of every micro-batch, a
    frozen model for its forward, the rollout copy once. Gradients are reduced in float32: once, or
    in every micro-batch if they are sharded.
    """
    number = micro_batch(run).number
    samples_here = isinstance(run.config, GRPOConfig) and not run.config.rollout_server
    passes = 2 * number + samples_here
    frozen = [*([run.reference] if run.reference else []), *run.reward_models]
    gathered = passes * run.policy.numbers() + number * sum(model.numbers() for model in frozen)
    reductions = number if run.config.shard_gradients else 1
    reduced = FLOAT32 * reductions * run.policy.numbers(trained=True)
    return (run.number_bytes * gathered + reduced) * (run.ranks - 1) / run.ranks


def cells(name: str, ranks: int, tried: Iterable[tuple[str, Run]]) -> list[str]:
    """A row of the table."""
    flags, run, most = fitting(tried, ranks)
    if run.config.shard_gradients:
        flags = f"{flags} --shard_gradients true".strip()
    work = sum(n for name, n in step_flops(run).items() if name != "sampling")
    seconds = [work / ranks / FLOPS / share for share in UTILISATION]
    return [
        name,
        f"{ranks}",
        flags or "none",
        gigabytes(most.total),
        gigabytes(host_bytes(run)[-1]),
        gigabytes(sent_bytes(run)),
        " to ".join(f"{s:,.0f}" if s >= 1000 else f"{s:.3g}" for s in seconds),
    ]


def table(stage: str) -> str:
    """All models on all numbers of GPUs."""
    headers = ["model", "GPUs", "flags", "GB of a GPU", "GB on its host", "GB sent a step"]
    headers += ["s a step at 50% to 15% of the FLOP/s"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in MODELS.items():
            path = Path(folder, f"{name}.json")
            path.write_text(json.dumps(shape))
            rows += [cells(name, ranks, rungs(stage, path)) for ranks in RANKS]
    return markdown_table(headers, rows)


TABLES: dict[str, Callable[[], str]] = {
    f"ladder.{stage.lower()}": partial(table, stage) for stage in STAGES
}
