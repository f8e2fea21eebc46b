"""Claims about GPUs that need none: stages and options run on a device that is not the CPU.

Their numbers are the CPU's up to rounding, as other kernels compute them, and nothing launches more
kernels, or has the host wait more often, than a table says. The device is that of
`tests/support/sim_device.py`. No GPU was there. About `train_sft`, `train_reward`, `train_dpo`,
`train_grpo`, `evaluate` and `common.sampling.graphs`.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import sim_device
import tiny
import torch
from ranks import SHORT_RUN, arguments, launch, run_stages, untimed_lines
from safetensors.torch import load_file
from sim_device import decode_simulated, rollouts_simulated
from torch.utils._python_dispatch import TorchDispatchMode

import evaluate
from common.batch import tensors_of
from common.checkpoint import layout
from common.config.parser import parse
from common.data import PromptGroup, collate
from common.model import fsdp
from common.report import evaluation_report
from common.run import Run

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
RESAMPLE = {"zero_variance": "resample", "aggregation": "prompt"}
LORA = {"lora_r": 2, "baseline": "kept", "kl_estimator": "k1_reward"}
VARIANTS: dict[str, dict[str, Any]] = {
    "sft": SAMPLED,
    "sft padded": {"layout": "padded"},
    "sft bf16": {"bf16": True},
    "sft sharded": {"bf16": True},  # by FSDP, as in several processes
    "reward": {"sft_dataset_name": "synthetic", "num_sft_rows": 9},
    "dpo": {},
    "dpo lora": {"lora_r": 2, "eval_steps": 0},
    "grpo": GRPO | SAMPLED | {"num_iterations": 2, "reward_funcs": ["REWARD MODEL", "gold"]},
    "grpo exact": GRPO | EXACT,
    "grpo resample": GRPO | RESAMPLE,
    "grpo lora": GRPO | LORA | {"policy_objective": ["clip", "sampler_weights"]},
    "grpo bf16": GRPO | {"bf16": True},
    "grpo sharded": GRPO | {"bf16": True},
    "grpo padded": GRPO | {"layout": "padded", "entropy_coef": 0.01, "top_p": 0.9},
}


LONG = 64  # tokens, of which the rows of a bad step have more
STEPS, SAVED = 2, 1
MOVES: dict[str, dict[str, Any]] = {"sft": {}, "grpo": VARIANTS["grpo exact"]}


class MicroBatch(NamedTuple):
    """The largest cost of one, forward and backward."""

    per_block: int  # kernels
    outside: int  # kernels outside the model's two blocks: the first and the last, head and loss
    masked: int  # attention calls that are given a mask, backward too
    waits: int  # of the host


class Token(NamedTuple):
    """The largest cost of drawing one more token of all completions."""

    per_block: int  # kernels
    outside: int  # kernels
    waits: float  # of the host
    waits_per_call: int  # of `decode`, without those of its tokens


MICRO_BATCHES = {
    "sft": MicroBatch(47, 85, 0, 0),
    "sft padded": MicroBatch(41, 65, 4, 0),
    "sft bf16": MicroBatch(34, 92, 0, 0),
    "sft sharded": MicroBatch(98, 102, 0, 0),
    "reward": MicroBatch(57, 123, 0, 0),
    "dpo": MicroBatch(57, 170, 0, 0),
    "dpo lora": MicroBatch(85, 167, 0, 0),
    "grpo": MicroBatch(57, 176, 0, 0),
    "grpo exact": MicroBatch(57, 183, 0, 0),
    "grpo lora": MicroBatch(85, 177, 0, 0),
    "grpo bf16": MicroBatch(46, 187, 0, 0),
    "grpo padded": MicroBatch(41, 166, 4, 0),
}
TOKENS = {
    "shared_prefix": Token(24, 38, 1 / 8, 2),
    "shared_prefix replayed": Token(0, 32, 1 / 8, 2),
    "padded": Token(12, 51, 1 / 8, 6),
}
# Of the host: for whether an update's norm is finite, for the scores of a whole split, and for the
# metrics of a step that is logged.
WAITS = {"update": 1, "scoring": 1, "step": 1}
# And for rewards, and for a KL in the reward.
MORE_WAITS = {("grpo", "step"): 1, ("grpo lora", "step"): 1}


def run_all(jobs: Sequence[dict[str, Any]], *, simulated: bool) -> list[dict[str, Any]]:
    """Run stages and evaluations: the counts of each job's phases, and a spoilt one's message."""
    if simulated:
        sim_device.set_up()
    records = []
    for job in jobs:
        sim_device.phases.clear()
        message = ""
        shard = tiny.shard_with_fsdp if "sharded" in job["name"] else fsdp.shard
        with (
            sim_device.on_sim() if simulated else contextlib.nullcontext(),
            mock.patch.object(fsdp, "shard", shard),
        ):
            if job["stage"] == "evaluate":
                with mock.patch.object(evaluation_report, "write_report"):  # pictures
                    evaluate.main(parse(evaluate.EvaluateConfig, arguments(job["flags"])))
            elif "bad" in job["name"]:
                message = sentence_of(job)
            else:
                run_stages([job])
        phases = {kind: [*map(vars, counts)] for kind, counts in sim_device.phases.items()}
        records.append({"message": message, "phases": phases})
    return records


def sentence_of(job: dict[str, Any]) -> str:
    """Run a stage whose weights and loss are NaN for long rows from the second update on."""
    update = Run.update

    def spoil(run: Run) -> None:
        if run.step == 1:
            with torch.no_grad():
                run.module.lm.transformer.wpe.weight[LONG:] = torch.nan
            run.losses = [loss * torch.nan for loss in run.losses]
        update(run)

    with mock.patch.object(Run, "update", spoil), pytest.raises(RuntimeError) as caught:
        run_stages([job])
    return str(caught.value)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path
) -> tuple[Path, dict[tuple[str, str], dict[str, Any]]]:
    """The folder of all runs, `cpu/` and `sim/`, and the record of `run_all` of each.

    Those in `deeper/` have a block more, and a step less.
    """
    folder = tmp_path_factory.mktemp("device")
    deeper = folder / "deeper.json"
    deeper.write_text(json.dumps(json.loads(tiny_gpt2.read_text()) | {"n_layer": 3}))
    trained, judge = (str(folder / "cpu" / name / "model") for name in ("sft", "reward"))

    def job(device: str, name: str, flags: dict[str, Any], start: Path | str = trained) -> Any:
        paths = {"output_dir": str(folder / device / name), "model_name_or_path": str(start)}
        flags = flags | paths | {"tokenizer_name_or_path": str(tokenizer_folder)}
        if "REWARD MODEL" in flags.get("reward_funcs", ()):
            flags["reward_funcs"] = [judge, "gold"]
        return {"name": name, "stage": name.split()[0], "flags": flags, "device": device}

    def on(device: str) -> list[dict[str, Any]]:
        jobs = []
        for name, flags in VARIANTS.items():
            start = tiny_gpt2 if name.startswith("sft") else trained
            jobs.append(job(device, name, COMMON | flags, start))
        for stage, flags in MOVES.items():
            jobs.append(job(device, f"{stage} bad", COMMON | flags))
            flags = COMMON | flags | {"max_steps": STEPS, "save_steps": SAVED, "eval_steps": 0}
            jobs.append(job(device, f"{stage} whole", flags))
            saved = layout.folder_of(folder / device / f"{stage} whole", SAVED)
            flags |= {"resume_from_checkpoint": str(saved)}
            jobs.append(job(device, f"{stage} resumed", flags))
        names = {f.name for f in fields(evaluate.EvaluateConfig)}
        flags = {name: value for name, value in COMMON.items() if name in names}
        flags |= {"policies": [trained], "reward_models": [judge], "num_prompts": 4}
        return [*jobs, job(device, "evaluate", flags | {"reward_funcs": ["gold"]})]

    short = {"max_steps": 1, "eval_steps": 0, "num_sample_prompts": 0}
    simulated = on("sim")
    for name in MICRO_BATCHES:
        start = deeper if name.startswith("sft") else folder / "deeper" / "sft" / "model"
        simulated.append(job("deeper", name, COMMON | VARIANTS[name] | short, start))
    by_run = {}
    for jobs in (on("cpu"), simulated):
        (records,) = launch(run_all, 1, folder, timeout=900, jobs=jobs, simulated=jobs is simulated)
        by_run |= {(j["device"], j["name"]): r for j, r in zip(jobs, records, strict=True)}
    return folder, by_run


@pytest.mark.parametrize("name", VARIANTS)
def test_the_device_computes_what_the_cpu_does(runs: Any, name: str) -> None:
    lines, expected = (untimed_lines(runs[0] / device / name) for device in ("sim", "cpu"))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    rel = 2**-8 if "bf16" in VARIANTS[name] else 1e-4  # of bfloat16 neighbours: a rounding
    for line, target in zip(lines, expected, strict=True):
        for metric in {"loss", "grad_norm", "eval_loss", "reward"} & target.keys():
            assert line[metric] == pytest.approx(target[metric], rel=rel, abs=1e-6), metric


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_without_fsdp_a_run_has_the_same_bits(runs: Any, stage: str, device: str) -> None:
    plain, sharded = (runs[0] / device / f"{stage} {kind}" for kind in ("bf16", "sharded"))
    assert untimed_lines(plain) == untimed_lines(sharded)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (plain, sharded)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_a_micro_batch_costs_no_more_than_this(runs: Any, name: str) -> None:
    costs, deeper = (most(runs[1][key, name]["phases"]["micro-batch"]) for key in ("sim", "deeper"))
    per_block = deeper["kernels"] - costs["kernels"]
    outside = costs["kernels"] - 2 * per_block
    check(MicroBatch(per_block, outside, costs["masked"], costs["waits"]), MICRO_BATCHES[name])


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_the_host_waits_no_more_often_than_this(runs: Any, name: str, kind: str) -> None:
    phases = runs[1]["sim", name]["phases"].get(kind, [])
    if kind == "step":
        phases = phases[-2:]  # the last one, which checks nothing, and the end of the loop
    allowed = WAITS[kind] + MORE_WAITS.get((name, kind), 0)
    assert [phase["waits"] for phase in phases if sum(phase["waits"].values()) > allowed] == []


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_costs_no_more_than_this(tmp_path: Path, name: str) -> None:
    kind = {"layout": name.split()[0], "replays": " " in name}
    (counts,) = launch(decode_simulated, 1, tmp_path, **kind, depths=(2, 3), lengths=(4, 20))
    short, long, short_deeper, long_deeper = (most([one]) for one in counts)
    kernels, waits = ((long[key] - short[key]) / (20 - 4) for key in ("kernels", "waits"))
    per_block = (long_deeper["kernels"] - short_deeper["kernels"]) / (20 - 4) - kernels
    cost = Token(per_block, kernels - 2 * per_block, waits, short["waits"] - 4 * waits)
    check(cost, TOKENS[name])


class Dispatches(TorchDispatchMode):
    """Counts operators, without `detach`, which only the simulated device is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function.overloadpacket.__name__ != "detach"
        return function(*args, **(kwargs or {}))


def dispatches_of_a_batch() -> list[int]:
    """Of batches of SFT, pairs and groups, made and moved to the device; values are unchanged."""
    sim_device.set_up()
    numbers = []
    for num_prompts, num_completions in ((64, 1), (32, 2), (16, 8)):
        completions = [[3] * (k + 1) for k in range(num_completions)]
        slots = list(range(num_completions))
        groups = [PromptGroup([2] * (n + 1), completions, slots) for n in range(num_prompts)]
        with sim_device.on_sim(), Dispatches() as count:
            host = collate(groups, tiny.train_config(), 0)
            batch = host.to("sim:0")
        numbers.append(count.number)
        for here, there in ((host, batch), (host.layout, batch.layout)):
            for name, tensor in tensors_of(here).items():
                assert torch.equal(getattr(there, name).data_here, tensor), name
    return numbers


def test_a_batch_is_made_and_moved_by_few_operators(tmp_path: Path) -> None:
    """However many prompts it has: one by one they took 650."""
    (numbers,) = launch(dispatches_of_a_batch, 1, tmp_path)
    assert max(numbers) < 40


STOPS = [0, 30, 60]  # of 61 tokens


def test_replayed_graphs_draw_what_is_drawn_without_them(tmp_path: Path) -> None:
    """Three rollouts each; rows stop, so that batches shrink, or none does."""
    kinds = [("gpt2", STOPS, True), ("llama", STOPS, False), ("llama", [-1], True)]
    variants = [
        (family, stop_ids, {"bf16": bf16, "cuda_graphs": graphs})
        for family, stop_ids, bf16 in kinds
        for graphs in (True, False)
    ]
    (rollouts,) = launch(rollouts_simulated, 1, tmp_path, variants=variants)
    for replayed, plain in zip(rollouts[::2], rollouts[1::2], strict=True):
        assert [one["drawn"] for one in replayed] == [one["drawn"] for one in plain]
        assert [one["waits"] for one in replayed] == [one["waits"] for one in plain]
        assert replayed[0]["drawn"] != replayed[1]["drawn"] != replayed[2]["drawn"]
        assert all(one["replays"] > 8 for one in replayed)
        assert sum(one["captures"] for one in replayed) == replayed[-1]["graphs"]
        assert not any(one["captures"] + one["replays"] for one in plain)
    # No row stops: two batches of 20 tokens, in two widths of keys.
    assert [one["captures"] for one in rollouts[4]] == [4, 0, 0]
    assert [one["replays"] for one in rollouts[4]] == [2 * 19 - 4, 2 * 19, 2 * 19]


def test_graphs_are_dropped_with_their_memory(tmp_path: Path) -> None:
    variants = [("llama", [-1], {"bf16": True, "cuda_graphs": graphs}) for graphs in (True, False)]
    (rollouts,) = launch(rollouts_simulated, 1, tmp_path, variants=variants, max_kept_bytes=1000)
    dropped, plain = rollouts
    assert [one["drawn"] for one in dropped] == [one["drawn"] for one in plain]
    assert [(one["captures"], one["graphs"]) for one in dropped] == [(4, 0)] * 3
    with pytest.raises(AssertionError, match="a graph reads torch.bfloat16 .* that was freed"):
        launch(rollouts_simulated, 1, tmp_path, variants=variants[:1], fills_copy=False)


def most(phases: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The most kernels, attention calls with a mask, and waits of any phase."""
    masked = [[n for name, n in p["kernels"].items() if "with a mask" in name] for p in phases]
    totals = {key: max(sum(p[key].values()) for p in phases) for key in ("kernels", "waits")}
    return totals | {"masked": max(map(sum, masked))}


def check(costs: Any, allowed: Any) -> None:
    named = zip(costs._fields, costs, allowed, strict=True)
    over = {name: (cost, limit) for name, cost, limit in named if cost > limit}
    assert not over, over


@pytest.mark.parametrize("stage", MOVES)
def test_a_bad_step_names_its_rows(runs: Any, stage: str) -> None:
    on_cpu, there = (
        re.search(
            r"the loss of 1 ranks .* those of \d+ rows, [^.]+\.",
            runs[1][device, f"{stage} bad"]["message"],
        )
        for device in ("cpu", "sim")
    )
    assert on_cpu
    assert there
    assert there[0] == on_cpu[0]


@pytest.mark.parametrize("stage", MOVES)
def test_a_resumed_run_is_the_run_that_never_stopped(runs: Any, stage: str) -> None:
    whole, resumed = (runs[0] / "sim" / f"{stage} {kind}" for kind in ("whole", "resumed"))
    lines = untimed_lines(whole)
    assert {line["step"] for line in lines} == set(range(1, STEPS + 1))
    assert untimed_lines(resumed) == [line for line in lines if line["step"] > SAVED]
    weights, again = (load_file(run / "model" / "model.safetensors") for run in (whole, resumed))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_an_evaluation_finds_the_same(runs: Any) -> None:
    there, on_cpu = (
        json.loads((runs[0] / device / "evaluate" / "results.json").read_text())
        for device in ("sim", "cpu")
    )
    assert [system["name"] for system in there["systems"]] == ["sft", "reward"]
    for key in ("systems", "win_rates", "comparison"):
        values, expected = (dict(numbers(results[key])) for results in (there, on_cpu))
        assert len(values) > 1
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-6)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in lists and dictionaries, but for timings, by where they stand."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{path}/{key}")
    elif isinstance(value, int | float) and not path.endswith(("minutes", "memory_gb")):
        yield path, value
