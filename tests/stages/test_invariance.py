"""How a run is split changes nothing: not the ranks, the micro-batches, nor what saves memory.

For SFT, reward model, DPO and GRPO with dropout off, in float32: loss and gradient norm agree to
1e-5 relative over the first 5 steps, and to 1e-3 over 50. GRPO samples the same completions,
because a draw leaves little room to rounding. About `train_sft`, `train_reward`, `train_dpo` and
`train_grpo`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import SHORT_RUN, TIMINGS, launch, run_stages, with_paths
from safetensors.torch import load_file

from common import distributed, noise
from common.config.stages import CommonConfig
from common.record.jsonl import read_jsonl
from common.rewards.models import RewardModelFunction
from common.sampling.decode import draw_token, inverse_cdf

SHORT, LONG = 5, 50  # steps
TASKS = ("sft", "reward", "dpo", "grpo", "grpo_global", "grpo_masked")
LONG_TASKS = TASKS[:4]

# 19 rows in batches of 8 leave 3 for the third step, 5 filler rows, and on 4 ranks nothing for the
# last one; in GRPO's batches of 4 prompts 3 are left for the fifth step.
COMMON = SHORT_RUN | {
    "num_train_rows": 19,
    "num_eval_rows": 7,
    "max_completion_length": 24,
    "lr_scheduler_type": "constant",  # the same for runs of 5 and of 50 steps
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
    "dpo": {"label_smoothing": 0.1},
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
        "policy_objective": ["dppo", "off_policy_mask", "geometric_mask", "sampler_drift"],
        "objective_args": ["threshold=1e-3", "coef=0.1"],
        "epsilon_low": 1e-3,
        "epsilon_high": 1e-3,
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
    is_long: bool = False


VARIANTS = {
    "baseline": Variant(1, {}, is_long=True),
    "micro-batches of 1": Variant(1, {"micro_batch_size": 1, "generation_batch_size": 3}),
    "2 ranks": Variant(2, {"micro_batch_size": 3}, is_long=True),
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
}
OTHER_ROWS = ("3 rows and filler", "3 rows")
FLOAT32 = [name for name in VARIANTS if name not in ("baseline", "bfloat16", *OTHER_ROWS)]
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

    def difference(self, variant: str, task: str, metric: str, num_steps: int) -> float:
        """The largest relative difference to the baseline over the first steps."""
        expected = self.series("baseline", task, metric, num_steps)
        values = self.series(variant, task, metric, num_steps)
        assert values.shape == expected.shape == (num_steps,)
        return float(((values - expected) / expected).abs().max())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path) -> Runs:
    """All runs, in one launch for each number of ranks; all start from the baseline's models."""
    folder = tmp_path_factory.mktemp("invariance")
    paths = {
        "model_name_or_path": str(folder / "baseline" / "sft" / "model"),
        "tokenizer_name_or_path": str(tokenizer_folder),
    }
    names = {
        "REWARD MODEL": str(folder / "baseline" / "reward" / "model"),
        "OTHER MODEL": str(tiny_gpt2),
    }

    def job(variant: str, task: str) -> dict[str, Any]:
        is_long = VARIANTS[variant].is_long and task in LONG_TASKS
        flags = COMMON | paths | FLAGS[task] | VARIANTS[variant].flags
        flags |= {
            "max_steps": LONG if is_long else SHORT,
            "output_dir": str(folder / variant / task),
        }
        if task == "sft":
            flags["model_name_or_path"] = str(tiny_gpt2)
        return {"stage": task.partition("_")[0], "flags": with_paths(flags, names)}

    seen = {}
    for num_ranks in (1, 2, 4):
        chosen = [
            (variant, task)
            for variant, v in VARIANTS.items()
            if v.num_ranks == num_ranks
            for task in v.tasks
        ]
        records = launch(run_stages, num_ranks, folder, jobs=[job(*run) for run in chosen])
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
def test_fifty_steps_do_not_drift_apart(runs: Runs, task: str, metric: str) -> None:
    assert runs.difference("2 ranks", task, metric, LONG) < 1e-3


@pytest.mark.parametrize("task", LONG_TASKS)
def test_the_runs_compared_change_the_model(runs: Runs, task: str) -> None:
    assert runs.series("baseline", task, "grad_norm", LONG).min() > 1e-3
    if task != "grpo":  # whose loss and reward are those of other completions in every step
        loss = runs.series("baseline", task, "loss", LONG)
        assert loss[-10:].mean() < loss[:5].mean() - 0.1


@pytest.mark.parametrize(("variant", "task"), [run for run in RUNS if "grpo" in run[1]])
def test_completions_are_the_same_token_by_token(runs: Runs, variant: str, task: str) -> None:
    num_steps = LONG if VARIANTS[variant].is_long and task in LONG_TASKS else SHORT
    (baseline,) = runs.seen["baseline", task]
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
    whole_run = {"reward_shift"}  # at the end of a short run, and not at that step of a long one
    first = [
        [
            line
            for line in runs.lines(name, task)
            if line["step"] <= SHORT and not whole_run & {*line}
        ]
        for name in ("baseline", variant)
    ]
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
    short = [name for name, task in RUNS if task == "reward" and not VARIANTS[name].is_long]
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
