"""The plan of a run as text: sizes, operations, and memory by number of ranks."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from common import distributed
from common.config.stages import TrainConfig
from common.grpo.config import GRPOConfig
from common.model.checks import Kind
from common.pairs.config import DPOConfig
from common.record.terminal import format_number, markdown_table
from common.rewards.functions import is_reward_model
from experiments.plan import footprint
from experiments.plan.memory import COLUMNS, HOST_COLUMNS, host_bytes, moments, peak
from experiments.plan.work import Run, has_reference, micro_batch, piece_tokens, step_flops


def make_run(config: TrainConfig, *, on_gpu: bool) -> Run:
    """Count the models of a run, from their configurations.

    Raises:
        UserError: a model is not there, or cannot be counted.
    """
    path, names = config.model_name_or_path, getattr(config, "reward_funcs", [])
    kind: Kind = "trunk" if config.stage == "reward model" else "policy"
    policy = footprint.of_model(path, kind, config, trains=True)
    reference = None
    if isinstance(config, DPOConfig | GRPOConfig) and has_reference(config):
        other = config.ref_model_name_or_path
        if not (config.lora_r and other == path):  # else it is inside the policy
            reference = footprint.of_model(other, "policy", config, trains=False)
    reward_models = tuple(
        footprint.of_model(name, "reward_model", config, trains=False)
        for name in names
        if is_reward_model(name)
    )
    # Counting has imported all that a run imports, and holds nothing.
    process = 0.0 if on_gpu else resident_bytes()
    return Run(config, policy, reference, reward_models, on_gpu, process, config.shard_gradients)


def resident_bytes() -> float:
    """Bytes of memory that this process has now; where only its peak is known, that."""
    statm = Path("/proc/self/statm")  # total and resident pages, and others
    if statm.exists():
        return float(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return distributed.peak_resident_gb() * 1e9


def page(run: Run, all_ranks: Sequence[int]) -> str:
    """The plan as text: sizes, operations, and a table by number of ranks.

    Raises:
        UserError: the run would be refused on one of these numbers of ranks.
    """
    config = run.config
    for ranks in all_ranks:
        distributed.refuse_replicas(config.num_replicas, ranks)
        distributed.refuse_uneven(config.batch_size, ranks)
    roles = [("trained model", run.policy)]
    roles += [("reference", run.reference)] if run.reference else []
    roles += [("reward model", model) for model in run.reward_models]
    tokens = config.batch_size * piece_tokens(run, run.num_completions)
    work = step_flops(run)
    operations = ", ".join(f"{name} {format_number(n / 1e12)}" for name, n in work.items())
    return "\n".join(
        [
            f"plan of {config.stage}, prompts of {config.max_prompt_length} tokens with "
            f"{run.num_completions} x {config.max_completion_length}",
            *(
                f"{role}: {model.name}, {model.numbers() / 1e6:,.1f} M parameters, "
                f"{model.numbers(trained=True) / 1e6:,.1f} M trained"
                for role, model in roles
            ),
            f"a step: {config.batch_size:,} rows, {tokens:,} tokens; TFLOP: {operations}; "
            f"all {format_number(sum(work.values()) / 1e12)}",
            f"GB of a rank on {'a GPU' if run.on_gpu else 'a CPU'} when it holds most "
            "(1 GB = 10^9 bytes):",
            *tables(run, all_ranks),
        ]
    )


def tables(run: Run, all_ranks: Sequence[int]) -> list[str]:
    """By number of ranks: what is held at the worst moment, at each one, and on a GPU's host."""

    def table(headers: Sequence[str], cells: Callable[[int], Iterable[str]]) -> str:
        rows = [[f"{ranks}", *cells(ranks)] for ranks in all_ranks]
        return markdown_table(["ranks", *headers], rows)

    def at_peak(ranks: int) -> list[str]:
        most, batch = peak(run, ranks), micro_batch(run, ranks)
        parts = [gigabytes(most.parts.get(column, 0.0)) for column in COLUMNS]
        return [f"{batch.number}", *parts, gigabytes(most.total), most.name, other_peak(ranks)]

    def other_peak(ranks: int) -> str:
        return gigabytes(peak(replace(run, shards_gradients=not run.shards_gradients), ranks).total)

    other = "whole" if run.shards_gradients else "sharded"
    names = [moment.name for moment in moments(run, all_ranks[0])]
    found = [
        table(["micro-batches", *COLUMNS, "peak", "when", f"peak, {other} gradients"], at_peak),
        "GB at each moment:",
        table(names, lambda ranks: [gigabytes(moment.total) for moment in moments(run, ranks)]),
    ]
    if run.on_gpu:
        found += [
            "CUDA and NCCL themselves, and gaps between allocations, are not counted",
            "GB of a rank on its host, beside Python and its libraries:",
            table(HOST_COLUMNS, lambda ranks: map(gigabytes, host_bytes(run, ranks))),
        ]
    return found


def gigabytes(number: float) -> str:
    """Bytes for people, three digits behind the point below ten."""
    value = number / 1e9
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
