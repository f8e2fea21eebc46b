"""Claims about GPUs that need none: stages and options run on a device that is not the CPU.

No tensor of the host meets one of the device; losses and gradient norms are the CPU's up to
rounding (other kernels compute them); and no micro-batch, update, step or token launches more
kernels, or has the host wait for the device more often, than a table says (`tests/sim_device.py`).
No GPU was there.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ranks import SHORT_RUN, launch, run_stages, untimed_lines
from sim_device import decode_simulated, run_simulated

COMMON = SHORT_RUN | {
    "num_train_rows": 12,
    "num_eval_rows": 4,
    "max_completion_length": 12,
    "micro_batch_size": 2,
    "max_steps": 2,
    "eval_steps": 2,
}
GRPO = {
    "eval_steps": 0,
    "max_completion_length": 8,
    "temperature": 0.7,
    "num_candidates": 4,
    "num_generations": 3,
    "reward_funcs": ["gold"],
    "missing_eos_penalty": -0.2,
    "beta": 0.05,
}
SAMPLED = {"num_sample_prompts": 2}  # in a table
EXACT = {"kl_estimator": "full", "ref_update_steps": 1, "num_minibatches": 2}
RESAMPLE = {"zero_variance": "resample", "max_resamples": 2, "aggregation": "prompt"}
LORA = {"lora_r": 2, "kl_in": "reward", "baseline": "kept", "kl_estimator": "k1"}
VARIANTS: dict[str, dict[str, Any]] = {
    "sft": SAMPLED,
    "sft padded": {"layout": "padded"},
    "sft bf16": {"bf16": True},
    "reward": {"sft_dataset_name": "synthetic", "num_sft_rows": 9},
    "dpo": {},
    "dpo lora": {"lora_r": 2, "eval_steps": 0},
    "grpo": GRPO | SAMPLED | {"num_iterations": 2, "reward_funcs": ["REWARD MODEL", "gold"]},
    "grpo exact": GRPO | EXACT,
    "grpo resample": GRPO | RESAMPLE,
    "grpo lora": GRPO | LORA | {"sampler_correction": "token_truncate"},
    "grpo bf16": GRPO | {"bf16": True},
    "grpo padded": GRPO | {"layout": "padded", "entropy_coef": 0.01, "top_p": 0.9},
}


class MicroBatch(NamedTuple):
    """What one costs at most, forward and backward."""

    per_block: int  # kernels
    beside: int  # kernels beside the model's two blocks: the first and the last, head and loss
    masked: int  # attention calls that are given a mask, backward too
    waits: int  # of the host


class Token(NamedTuple):
    """What drawing one more token of all completions costs at most."""

    per_block: int  # kernels
    beside: int  # kernels
    waits: float  # of the host
    waits_per_call: int  # of `decode`, beside those of its tokens


MICRO_BATCHES = {
    "sft": MicroBatch(56, 151, 2, 0),
    "sft padded": MicroBatch(41, 70, 4, 0),
    "sft bf16": MicroBatch(111, 168, 2, 0),
    "reward": MicroBatch(67, 228, 6, 0),
    "dpo": MicroBatch(67, 280, 6, 0),
    "dpo lora": MicroBatch(95, 277, 6, 0),
    "grpo": MicroBatch(67, 180, 4, 0),
    "grpo exact": MicroBatch(67, 187, 4, 0),
    "grpo lora": MicroBatch(95, 174, 4, 0),
    "grpo padded": MicroBatch(41, 170, 4, 0),
}
TOKENS = {"shared_prefix": Token(24, 38, 1 / 8, 2), "padded": Token(12, 51, 1 / 8, 6)}
# Of the host: for whether an update's norm is finite, for the scores of a whole split, and for the
# metrics of a step that is logged.
WAITS = {"update": 1, "scoring": 1, "step": 1}
# And for rewards, and for a KL in the reward.
MORE_WAITS = {
    ("grpo", "step"): 1,
    ("grpo lora", "step"): 1,
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path
) -> tuple[Path, dict[str, dict[str, int]]]:
    """The folder of all runs, `cpu/` and `sim/`, and the parts of the simulated ones.

    Those in `deeper/` have a block more, and a step less.
    """
    folder = tmp_path_factory.mktemp("device")
    deeper = folder / "deeper.json"
    deeper.write_text(json.dumps(json.loads(tiny_gpt2.read_text()) | {"n_layer": 3}))

    def jobs(device: str, new: Path, trained: Path, names: Any, **changes: Any) -> list[Any]:
        found = []
        for name in names:
            stage = name.split()[0]
            flags = COMMON | VARIANTS[name] | changes | {"output_dir": str(folder / device / name)}
            flags |= {"model_name_or_path": str(new if stage == "sft" else trained / "model")}
            flags |= {"tokenizer_name_or_path": str(tokenizer_folder)}
            if "REWARD MODEL" in flags.get("reward_funcs", ()):
                flags["reward_funcs"] = [str(folder / "cpu" / "reward" / "model"), "gold"]
            found.append({"stage": stage, "flags": flags})
        return found

    on_cpu = (tiny_gpt2, folder / "cpu" / "sft")
    launch(run_stages, 1, folder, jobs=jobs("cpu", *on_cpu, VARIANTS))
    short = {"max_steps": 1, "eval_steps": 0, "num_sample_prompts": 0}
    all_jobs = jobs("sim", *on_cpu, VARIANTS)
    all_jobs += jobs("deeper", deeper, folder / "deeper" / "sft", MICRO_BATCHES, **short)
    (parts,) = launch(run_simulated, 1, folder, jobs=all_jobs)
    names = [("sim", name) for name in VARIANTS] + [("deeper", name) for name in MICRO_BATCHES]
    return folder, dict(zip(names, parts, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_device_computes_what_the_cpu_does(runs: Any, name: str) -> None:
    lines, expected = (untimed_lines(runs[0] / device / name) for device in ("sim", "cpu"))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, own in zip(lines, expected, strict=True):
        for metric in {"loss", "grad_norm", "eval_loss", "reward"} & own.keys():
            rel = 2**-8 if "bf16" in name else 1e-4  # of bfloat16 neighbours: a rounding
            assert line[metric] == pytest.approx(own[metric], rel=rel, abs=1e-6), metric


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_a_micro_batch_costs_no_more_than_this(runs: Any, name: str) -> None:
    costs, deeper = (most(runs[1][key, name]["micro-batch"]) for key in ("sim", "deeper"))
    per_block = deeper["kernels"] - costs["kernels"]
    beside = costs["kernels"] - 2 * per_block
    cost = MicroBatch(per_block, beside, costs["masked"], costs["waits"])
    over = above(cost, MICRO_BATCHES[name])
    assert not over, over


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_the_host_waits_no_more_often_than_this(runs: Any, name: str, kind: str) -> None:
    parts = runs[1]["sim", name].get(kind, [])
    if kind == "step":
        parts = parts[-2:]  # the last one, which checks nothing, and what is behind it
    allowed = WAITS[kind] + MORE_WAITS.get((name, kind), 0)
    assert [part["waits"] for part in parts if sum(part["waits"].values()) > allowed] == []


@pytest.mark.parametrize("layout", TOKENS)
def test_a_token_costs_no_more_than_this(tmp_path: Path, layout: str) -> None:
    given = {"layout": layout, "depths": (2, 3), "lengths": (4, 20)}
    (found,) = launch(decode_simulated, 1, tmp_path, **given)
    short, long, short_deeper, long_deeper = (most([one]) for one in found)

    def per_token(what: str, before: dict[str, int], after: dict[str, int]) -> float:
        return (after[what] - before[what]) / (20 - 4)

    kernels, waits = (per_token(what, short, long) for what in ("kernels", "waits"))
    per_block = per_token("kernels", short_deeper, long_deeper) - kernels
    cost = Token(per_block, kernels - 2 * per_block, waits, short["waits"] - 4 * waits)
    over = above(cost, TOKENS[layout])
    assert not over, over


def most(parts: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The most kernels, attention calls with a mask, and waits of any part."""
    masked = [[n for name, n in part["kernels"].items() if "with a mask" in name] for part in parts]
    found = {what: max(sum(part[what].values()) for part in parts) for what in ("kernels", "waits")}
    return found | {"masked": max(map(sum, masked))}


def above(found: Any, allowed: Any) -> dict[str, tuple[float, int]]:
    """The costs that are higher than is allowed, and what is."""
    costs = zip(found._fields, found, allowed, strict=True)
    return {name: (cost, most) for name, cost, most in costs if cost > most}
