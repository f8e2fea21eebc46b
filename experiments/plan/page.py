"""The plan of a run as text: sizes, operations, and memory by number of ranks."""

import os
from collections.abc import Sequence
from pathlib import Path

from common import distributed
from common.config.dpo import DPOConfig
from common.config.grpo import GRPOConfig
from common.config.stages import TrainConfig
from common.model.checks import Kind
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
    if config.layout != "shared_prefix":
        raise config.refused("layout", "shared_prefix, whose batches a plan counts")
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
    return Run(config, policy, reference, reward_models, on_gpu, process)


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
    is_sharded = run.config.shard_gradients
    other = run.with_flags(shard_gradients=not is_sharded)
    at_worst, at_each, on_host = [], [], []
    for ranks in all_ranks:
        here = run.on(ranks)
        every, most = moments(here), peak(here)
        cells = [gigabytes(most.columns.get(column, 0.0)) for column in COLUMNS]
        peaks = [gigabytes(most.total), most.name, gigabytes(peak(other.on(ranks)).total)]
        at_worst.append([f"{ranks}", f"{micro_batch(here).number}", *cells, *peaks])
        at_each.append([f"{ranks}", *(gigabytes(moment.total) for moment in every)])
        on_host.append([f"{ranks}", *map(gigabytes, host_bytes(here))])
    last = f"peak, {'whole' if is_sharded else 'sharded'} gradients"
    lines = [
        markdown_table(["ranks", "micro-batches", *COLUMNS, "peak", "when", last], at_worst),
        "GB at each moment:",
        markdown_table(["ranks", *(moment.name for moment in every)], at_each),
    ]
    if run.on_gpu:
        lines += [
            "CUDA and NCCL themselves, and gaps between allocations, are not counted",
            "GB of a rank on its host, beside Python and its libraries:",
            markdown_table(["ranks", *HOST_COLUMNS], on_host),
        ]
    return lines


def gigabytes(number: float) -> str:
    """Bytes for people, three digits behind the point below ten."""
    value = number / 1e9
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
