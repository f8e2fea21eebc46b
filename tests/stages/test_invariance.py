"""How a run is split changes nothing: not the ranks, the micro-batches, nor what saves memory.

For SFT, reward model, DPO and GRPO with dropout off: loss and gradient norm agree to 1e-5 relative
over the first 5 steps in float32, and to 1e-9 over 12 in float64, where rounding hides nothing.
GRPO samples the same completions, because a draw leaves little room to rounding. About
`train_sft`, `train_reward`, `train_dpo` and `train_grpo`.
"""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import SHORT_RUN, TIMINGS, launch, run_stages, with_paths
from safetensors.torch import load_file, save_file

from common import distributed, noise
from common.config.stages import CommonConfig
from common.model import rollout_copy
from common.record.jsonl import read_jsonl
from common.rewards.models import RewardModelFunction
from common.sampling.decode import draw_token, inverse_cdf

SHORT, LONG = 5, 12  # steps, in float32 and in float64
BEFORE = 50  # of the models that the runs start from
TASKS = ("sft", "reward", "dpo", "grpo", "grpo_global", "grpo_masked")
LONG_TASKS = TASKS[:4]

# 19 rows in batches of 8 leave 3 for the third step, 5 filler rows, and on 4 ranks nothing for the
# last one; in GRPO's batches of 4 prompts 3 are left for the fifth step.
COMMON = SHORT_RUN | {
    "num_train_rows": 19,
    "num_eval_rows": 7,
    "max_completion_length": 24,
    "lr_scheduler_type": "constant",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "eval_steps": SHORT,
    "batch_size": 8,
    "micro_batch_size": 8,
}
GRPO = {
    "max_completion_length": 16,
    "batch_size": 4,
    "temperature": 0.7,
    "learning_rate": 3e-4,
    "num_candidates": 3,
    "num_generations": 2,
    "num_iterations": 2,
    "reward_funcs": ["REWARD MODEL", "gold"],
    "missing_eos_penalty": -0.2,
}
FLAGS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 3e-3},
    "reward": {"learning_rate": 3e-4, "sft_dataset_name": "synthetic", "num_sft_rows": 9},
    "dpo": {"loss_type": ["sigmoid:label_smoothing=0.1"]},
    "grpo": GRPO,
    "grpo_global": GRPO
    | {
        "ref_model_name_or_path": "OTHER MODEL",
        "normalize_globally": True,
        "baseline": "kept",
        "rejection_method": "gumbel",
        "num_iterations": 1,
    },
    "grpo_masked": GRPO
    | {
        "policy_objective": [
            "dppo:epsilon_low=1e-3,epsilon_high=1e-3",
            "off_policy_mask:threshold=1e-3",
            "geometric_mask",
            "sampler_drift:coef=0.1",
        ],
        "advantages": "gdpo",
    },
}


SAVING = {
    "cpu_offload": True,
    "gradient_checkpointing": True,
    "reshard_after_forward": False,
}


@dataclass
class Variant:
    """A way to split the same runs."""

    num_ranks: int
    flags: dict[str, Any]
    tasks: tuple[str, ...] = TASKS
    in_float64: bool = False


VARIANTS = {
    "start": Variant(1, {"max_steps": BEFORE, "eval_steps": 0}, TASKS[:2]),
    "baseline": Variant(1, {}),
    "micro-batches of 1": Variant(1, {"micro_batch_size": 1, "generation_batch_size": 3}),
    "2 ranks": Variant(2, {"micro_batch_size": 3}),
    "2 replicas": Variant(2, {"micro_batch_size": 2, "num_replicas": 2}, ("sft", "grpo")),
    "padded": Variant(2, {"micro_batch_size": 2, "layout": "padded"}, LONG_TASKS),
    "few tokens at once": Variant(
        2, {"micro_batch_tokens": 150, "generation_batch_size": 7}, ("dpo", "grpo")
    ),
    "offload and recompute": Variant(2, SAVING, LONG_TASKS),
    "bfloat16": Variant(2, {"bf16": True}, LONG_TASKS),
    "4 ranks": Variant(4, {"micro_batch_size": 1}, TASKS[:-1]),
    "2 replicas of 2 shards": Variant(
        4, {"micro_batch_size": 2, "num_replicas": 2}, ("sft", "reward")
    ),
    # The same 3 rows in every step: a split cannot show whether filler counts, all splits have it.
    "3 rows and filler": Variant(1, {"num_train_rows": 3}, LONG_TASKS),
    "3 rows": Variant(1, {"num_train_rows": 3, "batch_size": 3}, LONG_TASKS),
    "long": Variant(1, {}, LONG_TASKS, in_float64=True),
    "long on 2 ranks": Variant(2, {"micro_batch_size": 3}, LONG_TASKS, in_float64=True),
}
OTHER_ROWS = ("3 rows and filler", "3 rows")
FLOAT64 = [name for name, variant in VARIANTS.items() if variant.in_float64]
OTHERS = ("start", "baseline", "bfloat16", *OTHER_ROWS, *FLOAT64)
FLOAT32 = [name for name in VARIANTS if name not in OTHERS]
RUNS = [(variant, task) for variant in FLOAT32 for task in VARIANTS[variant].tasks]


@dataclass
class Runs:
    """Every run of every variant, and what each rank saw in it."""

    folder: Path
    seen: dict[tuple[str, str], list[dict[str, Any]]]  # (variant, task) -> one per rank

    def lines(self, variant: str, task: str) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / variant / task / "metrics.jsonl")

    def series(self, variant: str, task: str, metric: str, num_steps: int) -> torch.Tensor:
        """A metric's values, one for each of the first steps, float64."""
        lines = [line for line in self.lines(variant, task) if metric in line]
        values = [line[metric] for line in lines if line["step"] <= num_steps]
        return torch.tensor(values, dtype=torch.float64)

    def difference(
        self, variant: str, task: str, metric: str, num_steps: int, to: str = "baseline"
    ) -> float:
        """The largest relative difference to another variant over the first steps."""
        expected = self.series(to, task, metric, num_steps)
        values = self.series(variant, task, metric, num_steps)
        assert values.shape == expected.shape == (num_steps,)
        return float(((values - expected) / expected).abs().max())


def run_in_float64(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`run_stages`, where all that is float32 is float64; packed weights have none."""

    def as_float64(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float64)

    torch.set_default_dtype(torch.float64)
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", as_float64),
        mock.patch.object(rollout_copy, "packed", contextlib.nullcontext),
    ):
        return run_stages(jobs)


def widen(folder: Path, copy: Path) -> None:
    """Copy finished runs, their weights as float64."""
    shutil.copytree(folder, copy)
    for file in copy.rglob("model.safetensors"):
        weights = {name: values.double() for name, values in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path) -> Runs:
    """All runs, in one launch for each number of ranks, from the same models."""
    folder = tmp_path_factory.mktemp("invariance")

    def job(variant: str, task: str) -> dict[str, Any]:
        base = folder / ("wide" if VARIANTS[variant].in_float64 else "start")
        paths = {"model_name_or_path": str(base / "sft" / "model")}
        paths |= {"tokenizer_name_or_path": str(tokenizer_folder)}
        names = {"REWARD MODEL": str(base / "reward" / "model"), "OTHER MODEL": str(tiny_gpt2)}
        paths |= {"output_dir": str(folder / variant / task)}
        steps = {"max_steps": LONG if VARIANTS[variant].in_float64 else SHORT}
        flags = COMMON | paths | steps | FLAGS[task] | VARIANTS[variant].flags
        if task == "sft":
            flags["model_name_or_path"] = str(tiny_gpt2)
        return {"stage": task.partition("_")[0], "flags": with_paths(flags, names)}

    seen = {}
    ways = [(run_stages, n) for n in (1, 2, 4)] + [(run_in_float64, n) for n in (1, 2)]
    for run_jobs, num_ranks in ways:
        if run_jobs is run_in_float64 and num_ranks == 1:
            widen(folder / "start", folder / "wide")
        chosen = [
            (variant, task)
            for variant, v in VARIANTS.items()
            if v.num_ranks == num_ranks and v.in_float64 == (run_jobs is run_in_float64)
            for task in v.tasks
        ]
        records = launch(run_jobs, num_ranks, folder, jobs=[job(*run) for run in chosen])
        for run, per_rank in zip(chosen, zip(*records, strict=True), strict=True):
            seen[run] = list(per_rank)
    return Runs(folder, seen)


@pytest.mark.parametrize(("variant", "task"), RUNS)
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_first_steps_do_not_depend_on_the_split(runs, variant, task, metric):
    assert runs.difference(variant, task, metric, SHORT) < 1e-5


@pytest.mark.parametrize("task", LONG_TASKS)
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_filler_rows_count_nowhere(runs: Runs, task: str, metric: str) -> None:
    filled, expected = (runs.series(name, task, metric, SHORT) for name in OTHER_ROWS)
    assert len(expected) == SHORT
    assert float(((filled - expected) / expected).abs().max()) < 1e-5


@pytest.mark.parametrize("task", LONG_TASKS)
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_in_float64_the_split_shows_in_no_step(runs: Runs, task: str, metric: str) -> None:
    assert runs.difference("long on 2 ranks", task, metric, LONG, to="long") < 1e-9


@pytest.mark.parametrize("task", LONG_TASKS)
def test_the_runs_compared_change_the_model(runs: Runs, task: str) -> None:
    assert runs.series("long", task, "grad_norm", LONG).min() > 1e-3
    if task != "grpo":  # whose loss and reward are those of other completions in every step
        loss = runs.series("long", task, "loss", LONG)
        assert loss[-3:].mean() < loss[:3].mean() - 0.1


GRPO_RUNS = [run for run in RUNS if "grpo" in run[1]] + [("long on 2 ranks", "grpo")]


@pytest.mark.parametrize(("variant", "task"), GRPO_RUNS)
def test_completions_are_the_same_token_by_token(runs: Runs, variant: str, task: str) -> None:
    base, num_steps = ("long", LONG) if variant in FLOAT64 else ("baseline", SHORT)
    (baseline,) = runs.seen[base, task]
    expected = {
        key: ids
        for key, ids in baseline["rollouts"].items()
        if int(key.split()[1].rstrip(",")) < num_steps
    }
    sampled: dict[str, Any] = {}
    for record in runs.seen[variant, task]:
        sampled |= {key: ids for key, ids in record["rollouts"].items() if key in expected}
    assert len(expected) >= 4 * num_steps - num_steps // 5  # each fifth step has a prompt less
    assert sampled == expected


def test_equal_completions_get_equal_rewards() -> None:
    """A reward model rounds by the batch; a group of equal completions must not train on that."""
    distributed.start()
    function = RewardModelFunction.__new__(RewardModelFunction)  # without a folder
    function.config = CommonConfig(output_dir="unused", micro_batch_size=2)
    function.tokenizer = SimpleNamespace(pad_token_id=1)
    function.same_ids, function.limit = True, None
    function.model = lambda batch: batch.slots.float()  # 0, 1, 2, ...: another in every place
    completion_ids = [[7, 0], [8, 0], [7, 0], [7, 0], [7, 0], [7, 0]]
    ids = {"completion_ids": completion_ids, "prompt_ids": [[5], [5], [5], [5], [6], [6]]}
    rewards = function([""] * 6, [""] * 6, **ids, has_stop=[True] * 6)
    assert rewards == [0.0, 1.0, 0.0, 0.0, 4.0, 4.0]


@pytest.mark.parametrize(("variant", "task"), RUNS)
def test_other_metrics_do_not_depend_on_the_split(runs: Runs, variant: str, task: str) -> None:
    ignored = TIMINGS | {"sampler_kl"}  # which is 0 up to rounding
    first = [runs.lines(name, task) for name in ("baseline", variant)]
    for expected, line in zip(*first, strict=True):
        assert line.keys() == expected.keys()
        # DPO's policy starts as its own reference: which of two rewards of 0 is larger, decides
        # the rounding, which is that of the batch in which the reference was scored ahead.
        first = {"accuracy"} if task == "dpo" and line["step"] == 1 else set()
        for name in line.keys() - ignored - first:
            # A reward of DPO is a difference of log-probabilities of 100 nats, 8e-6 of which is the
            # rounding unit of float32.
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


def test_reward_shift_does_not_depend_on_the_split(runs: Runs) -> None:
    short = ["baseline", *(name for name, task in RUNS if task == "reward")]
    lines = [line for name in short for line in runs.lines(name, "reward")]
    expected, *shifts = [line["reward_shift"] for line in lines if "reward_shift" in line]
    assert len(shifts) == len(short) - 1
    assert expected != 0
    # The shift is a mean of rewards of either sign: its rounding is theirs.
    names = ("chosen_reward", "rejected_reward")
    size = max(abs(line[name]) for line in lines for name in names if name in line)
    assert shifts == pytest.approx([expected] * len(shifts), abs=1e-5 * size)


@pytest.mark.parametrize(
    ("variant", "task"),
    [(name, task) for name, v in VARIANTS.items() if v.num_ranks > 1 for task in v.tasks],
)
def test_every_rank_ends_with_the_same_bits(runs: Runs, variant: str, task: str) -> None:
    records = runs.seen[variant, task]
    assert len(records) == VARIANTS[variant].num_ranks
    assert all(record["state"] == records[0]["state"] for record in records)
    assert ("lm.score.weight" in records[0]["state"]) == (task == "reward")


@pytest.mark.parametrize(("variant", "num_shards"), [("4 ranks", 4), ("2 replicas of 2 shards", 2)])
@pytest.mark.parametrize("task", ["sft", "reward"])
def test_parameters_are_sharded(runs: Runs, variant: str, num_shards: int, task: str) -> None:
    for record in runs.seen[variant, task]:
        share = record["num_local"] / record["num_total"]
        assert share == pytest.approx(1 / num_shards, rel=0.02)  # a 1-row head is on one rank


@pytest.mark.parametrize("task", LONG_TASKS)
def test_only_rank_0_holds_weights_before_sharding(runs: Runs, task: str) -> None:
    first, *others = runs.seen["4 ranks", task]
    num_models = {"sft": 1, "reward": 1, "dpo": 2, "grpo": 3}[task]
    assert first["devices"] == [["cpu"]] * num_models
    assert all(record["devices"] == [["meta"]] * num_models for record in others)


@pytest.mark.parametrize("task", LONG_TASKS)
def test_recomputing_and_offloading_are_really_on(runs: Runs, task: str) -> None:
    (record, _), (plain, _) = runs.seen["offload and recompute", task], runs.seen["bfloat16", task]
    assert record["is_offloaded"]
    assert not plain["is_offloaded"]
    num_backwards = SHORT * (2 if task == "grpo" else 1)  # which has two updates per rollout
    assert record["num_forwards"] == plain["num_forwards"] + num_backwards


@pytest.mark.parametrize("task", LONG_TASKS)
def test_bfloat16_keeps_float32_masters(runs: Runs, task: str) -> None:
    for record in runs.seen["bfloat16", task]:
        assert record["parameter_dtypes"] == ["float32"]
        assert record["gradient_dtypes"] == ["float32"]
        assert record["optimizer_dtypes"] == ["float32"]
        assert record["compute_dtypes"] == ["bfloat16"]
    weights = load_file(runs.folder / "bfloat16" / task / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    if task != "grpo":  # whose completions are others
        # bfloat16 has 8 bits: close to float32, and not the same (in one step it may be by chance).
        assert runs.difference("bfloat16", task, "grad_norm", 1) < 0.05
        assert runs.difference("bfloat16", task, "grad_norm", SHORT) > 1e-4
        assert runs.difference("bfloat16", task, "loss", SHORT) < 0.05


def test_a_short_batch_is_among_the_steps_compared(runs: Runs) -> None:
    tokens = runs.series("baseline", "sft", "tokens", SHORT)
    assert tokens[2] < 0.5 * tokens[[0, 1, 3, 4]].min()
    for task in ("reward", "dpo"):
        correct = 3 * runs.series("baseline", task, "accuracy", SHORT)[2]  # of 3 pairs
        assert float(2 * correct) == pytest.approx(round(float(2 * correct)))


def test_draw_in_two_steps_leaves_less_room_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    logps = torch.randn(1, 4096, generator=generator).log_softmax(-1)
    other = (logps + 1e-3 * torch.randn(1, 4096, generator=generator)).log_softmax(-1)
    uniforms = noise.uniform(0, torch.arange(4000)[:, None], torch.arange(2))  # (4000, 2)

    def num_changed(draw: Callable[..., torch.Tensor], numbers: torch.Tensor) -> int:
        drawn = [draw(values.expand(len(numbers), -1), numbers) for values in (logps, other)]
        return int((drawn[0] != drawn[1]).sum())

    at_once = num_changed(inverse_cdf, uniforms[:, 0])
    assert at_once > 20
    assert num_changed(draw_token, uniforms) < at_once / 4
