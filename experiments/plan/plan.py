"""What a run will take, without running it: memory of a rank, tokens and operations of a step.

`--dry_run true` prints it and ends. Nothing is trained, written or read but the models'
configurations, for which a config .json will do, that of a reward model too. Lengths are the limits
of the config: shorter rows take less. The models are counted in `footprint.py`; the formulas
are in `work.py`, `activations.py` and `memory.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from common import distributed
from common.checkpoint import files
from common.config import CommonConfig, TrainConfig
from common.errors import UserError
from common.grpo.config import GRPOConfig
from common.model.checks import Kind
from common.pairs.config import DPOConfig
from common.record.terminal import format_number, markdown_table
from common.rewards.functions import is_reward_model
from common.sampling.engine_config import EngineConfig
from experiments.plan import footprint
from experiments.plan.memory import COLUMNS, HOST_COLUMNS, host_bytes, moments, peak
from experiments.plan.work import Run, has_reference, micro_batch, piece_tokens, step_flops

Config = TypeVar("Config", bound=CommonConfig)
CHOSEN = {"micro_batch_tokens", "shard_gradients"}
CHOSEN |= {"generation_batch_size", "generation_cache_tokens"}
SHARE_OF_GPU = 0.9  # for what is planned; CUDA and NCCL take some, and gaps between allocations


def make_run(config: TrainConfig) -> Run:
    """Count the models of a run, from their configurations.

    Raises:
        UserError: a model is not there, or cannot be counted.
    """
    device = config.dry_run_device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device == "cuda"
    copies = on_gpu and config.layout == "shared_prefix"
    path, names = config.model_name_or_path, getattr(config, "reward_funcs", [])
    kind: Kind = "trunk" if config.stage == "reward model" else "policy"
    policy = footprint.of_model(path, kind, config, copies=copies, trains=True)
    reference = None
    if isinstance(config, DPOConfig | GRPOConfig) and has_reference(config):
        other = config.ref_model_name_or_path
        if not (config.lora_r and other == path):  # else it is inside the policy
            reference = footprint.of_model(other, "policy", config, copies=copies, trains=False)
    reward_models = tuple(
        footprint.of_model(name, "reward_model", config, copies=copies, trains=False)
        for name in names
        if is_reward_model(name)
    )
    # Counting has imported all that a run imports, and holds nothing.
    process = 0.0 if on_gpu else float(distributed.resident_bytes())
    is_sharded = config.shard_gradients == "true"
    return Run(config, policy, reference, reward_models, on_gpu, process, is_sharded)


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
    lines = [
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
    if getattr(config, "group_comparisons", False):
        lines += ["--group_comparisons true: a prompt is counted with one pair, and may have more"]
    return "\n".join(lines)


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


def fit_to_gpu(config: Config) -> Config:
    """A training run's config, with what `fitting` chooses where no flag says. Collective.

    Only on a GPU. A run that is resumed keeps its checkpoint's: rounding depends on them. A vLLM
    server that the run starts has its share apart. Of a run that cannot be planned gradients are
    sharded: they may not fit.
    """
    if not isinstance(config, TrainConfig) or distributed.device().type != "cuda":
        return config
    given = {name for name in config.given if getattr(config, name) != "auto"}
    if given >= CHOSEN:
        return config
    free = distributed.free_gpu_bytes(servers_share(config))
    chosen, why = {name: getattr(config, name) for name in CHOSEN}, "the run cannot be planned"
    ranks = distributed.world_size()
    if distributed.is_rank0():
        with suppress(UserError):
            if saved := of_checkpoint(config):
                chosen |= {name: saved[name] for name in CHOSEN & saved.keys()}
                why = "as in the checkpoint"
            else:
                distributed.refuse_replicas(config.num_replicas, ranks)
                chosen |= fitting(make_run(config), ranks, SHARE_OF_GPU * free)
                why = f"planned for {SHARE_OF_GPU:.0%} of the {gigabytes(free)} GB free on each GPU"
    chosen, why = distributed.from_rank0((chosen, why))
    chosen = {name: value for name, value in sorted(chosen.items()) if name not in given}
    if chosen.get("shard_gradients") == "auto":
        chosen["shard_gradients"] = "true"
    said = ", ".join(f"--{name} {value}" for name, value in chosen.items())
    distributed.print_rank0(f"{said}: {why}")
    return replace(config, **chosen)


def servers_share(config: TrainConfig) -> float:
    """The share of a GPU's memory that a vLLM server has which the run starts."""
    if isinstance(config, EngineConfig) and config.rollout_engine == "vllm":
        return 0.0 if config.rollout_server else config.rollout_memory
    return 0.0


def of_checkpoint(config: TrainConfig) -> dict[str, Any]:
    """The config in the checkpoint that the run would go on from; empty if there is none."""
    wanted = config.resume_from_checkpoint
    newest = files.newest_first(Path(config.output_dir)) if wanted in ("auto", "latest") else []
    for folder in newest or [Path(wanted)]:
        with suppress(ValueError):
            saved: dict[str, Any] = files.read_manifest(folder)["config"]
            return saved
    return {}


def fitting(run: Run, ranks: int, num_bytes: float) -> dict[str, Any]:
    """What is not given, so that a rank is planned to fit.

    Gradients are whole if they fit beside the least sizes, else sharded. Sizes are the largest that
    then fit, powers of 2: of a micro-batch up to 65,536 tokens (1,024 where none fits); if the
    stage samples what it trains on itself, up to 4,096 completions (16) at once, with room for
    their keys and values. And no more than a rank has in a step. They take memory at different
    moments, so each is chosen beside the other's least.
    """
    config, num_rows = run.config, run.config.batch_size // ranks

    def powers(least: int, most: int, need: int) -> list[int]:
        most = max(least, min(most, (need - 1).bit_length()))
        return [2**n for n in range(most, least - 1, -1)]

    prompt, own = config.max_prompt_length, config.max_completion_length
    tokens = powers(10, 16, num_rows * piece_tokens(run, run.num_completions))
    options: list[list[dict[str, Any]]] = [[{"micro_batch_tokens": n} for n in tokens]]
    trains_on_samples = config.stage == "GRPO" or getattr(config, "pairs_from", "") == "rollouts"
    if trains_on_samples and isinstance(config, EngineConfig) and config.rollout_engine == "own":
        samples = getattr(config, "num_candidates", 1)
        rows = powers(4, 12, num_rows * samples)
        sizes = [(n, -(-n // samples) * prompt + n * own) for n in rows]
        names = ("generation_batch_size", "generation_cache_tokens")
        options.append([dict(zip(names, pair, strict=True)) for pair in sizes])
    options = [
        [{name: n for name, n in one.items() if name not in config.given} for one in values]
        for values in options
    ]
    chosen = {name: size for values in options for name, size in values[-1].items()}

    def fits(more: dict[str, Any]) -> bool:
        tried = replace(run, config=replace(config, **chosen | more))
        return peak(tried, ranks).total <= num_bytes

    if config.shard_gradients == "auto":
        run = replace(run, shards_gradients=not fits({}))
    largest = [next(filter(fits, values), values[-1]) for values in options]
    chosen = {name: size for values in largest for name, size in values.items()}
    return chosen | {"shard_gradients": "true" if run.shards_gradients else "false"}


def dry_run(config: TrainConfig) -> None:
    """Print the plan for the numbers of ranks that are asked for, else for those launched."""
    all_ranks = config.dry_run_ranks or [distributed.world_size()]
    print(page(make_run(config), all_ranks), flush=True)
