r"""Large models on many GPUs by arithmetic: memory of a GPU, bytes it sends, seconds of a step.

    python -m experiments.bench.cluster_arithmetic > cluster.md

Nothing here was measured. Memory is what `--dry_run` plans (`planning/memory.py`): bfloat16,
gradient checkpointing, shared prompts, every GPU with one full micro-batch per step. Shapes are
those of the models' published configurations.

**Bytes** are those of `experiments/bench/scaling_arithmetic.py`, with as many micro-batches as the
plan says. **Compute** is the plan's count of operations at `--flops` times `--utilisation`.

**Bandwidth.** A collective inside a node runs at NVLink's, one way. One that spans nodes runs in as
many rings as a node has GPUs, each of which leaves a node over its own network card: together they
reach the cards' sum, or NVLink if that is less. HSDP shards inside nodes and adds the gradients'
shards up between nodes, every GPU over its own card.

**Latency.** A ring of R ranks hands each part on R - 1 times; every unit of the model is gathered
and reduced on its own. `--hop_seconds` is assumed for each.

If communication and compute overlap completely a step takes the longer one, if never their sum:
efficiency is compute / time for both.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import TrainConfig
from common.grpo.config import GRPOConfig
from experiments.bench.scaling_arithmetic import replica_bytes, sharded_bytes
from experiments.plan import plan
from experiments.plan.memory import peak
from experiments.plan.work import Run, micro_batch, step_flops
from train_sft import SFTConfig

GPUS_PER_NODE = 8
ALL_RANKS = (8, 64, 1024)
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2 XL": {
        "model_type": "gpt2",
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "Llama 2 7B": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "Llama 2 70B": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Cluster:
    """What a GPU reaches, and its links: bytes per second one way."""

    flops: float
    nvlink: float
    network: float
    hop_seconds: float


def config_of(stage: str, model: Path, ranks: int, replicas: int, tokens: int) -> TrainConfig:
    """A run whose every GPU fills one micro-batch per step."""
    prompt, own = 512, 56
    flags: dict[str, Any] = {
        "output_dir": "unused",
        "model_name_or_path": str(model),
        "max_prompt_length": prompt,
        "max_completion_length": own,
        "micro_batch_tokens": tokens,
        "bf16": True,
        "gradient_checkpointing": True,
        "num_replicas": replicas,
        "num_sample_prompts": 0,
        "dry_run": True,
        "dry_run_device": "cuda",
    }
    if stage == "SFT":
        return SFTConfig(**flags, batch_size=ranks * (tokens // (prompt + own)))
    rows = tokens // (prompt + 8 * own)
    rollouts = {"reward_funcs": ["gold"], "num_generations": 8}
    return GRPOConfig(**flags, **rollouts, batch_size=ranks * rows)


def sent_bytes(run: Run, ranks: int) -> tuple[float, float]:
    """Bytes that a rank sends per step in its shard group, and between replicas."""
    numbers, replicas = run.policy.numbers(), run.config.num_replicas
    kinds = sharded_bytes(numbers, ranks // replicas, micro_batch(run, ranks).number)
    if run.config.stage == "SFT":
        kinds = {k: v for k, v in kinds.items() if k.startswith(("policy", "gradients"))}
    return sum(kinds.values()), replica_bytes(numbers, ranks, replicas)


def communication_seconds(run: Run, ranks: int, cluster: Cluster) -> float:
    """Seconds of a step's collectives, one after another."""
    shards, replicas = run.num_shards(ranks), run.config.num_replicas
    inside, between = sent_bytes(run, ranks)
    spans_nodes = shards > GPUS_PER_NODE
    cards = GPUS_PER_NODE * cluster.network
    bandwidth = min(cluster.nvlink, cards) if spans_nodes else cluster.nvlink
    num_units, num_micro_batches = len(run.policy.blocks) + 1, micro_batch(run, ranks).number
    num_passes = 2 * num_micro_batches + 1  # gathered twice, reduced once
    if run.config.stage == "GRPO":
        num_passes += num_micro_batches + 1  # the reference, the rollout copy
    hops = num_units * (num_passes * (shards - 1) + 2 * (replicas - 1))
    return inside / bandwidth + between / cluster.network + hops * cluster.hop_seconds


def row_of(name: str, run: Run, ranks: int, cluster: Cluster) -> list[str]:
    """The cells of a line."""
    most = peak(run, ranks)
    compute = sum(step_flops(run).values()) / ranks / cluster.flops
    communication = communication_seconds(run, ranks, cluster)
    total, overlapped = compute + communication, max(compute, communication)
    return [
        name,
        f"{ranks}",
        "HSDP" if run.config.num_replicas > 1 else "FSDP",
        f"{most.total / 1e9:.1f}",
        most.name,
        f"{sum(sent_bytes(run, ranks)) / 1e9:.1f}",
        f"{compute:.2f}",
        f"{communication:.2f}",
        f"{100 * compute / total:.0f}..{100 * compute / overlapped:.0f}",
    ]


def table(stage: str, cluster: Cluster, tokens: int, folder: Path) -> str:
    """All models on all numbers of GPUs."""
    headers = ["model", "GPUs", "layout", "GB of a GPU", "when", "GB sent", "compute s"]
    lines = [f"| {' | '.join([*headers, 'communication s', 'efficiency %'])} |", "|" + " --- |" * 9]
    for name, shape in MODELS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(shape))
        for ranks in ALL_RANKS:
            for replicas in sorted({1, ranks // GPUS_PER_NODE}):
                run = plan.make_run(config_of(stage, path, ranks, replicas, tokens))
                lines.append(f"| {' | '.join(row_of(name, run, ranks, cluster))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--flops", type=float, default=989e12, help="bfloat16 FLOP/s of a GPU, dense (H100 SXM)")
    add("--utilisation", type=float, default=0.4, help="share of them that is reached")
    add("--nvlink", type=float, default=450e9, help="bytes/s of a GPU inside a node, one way")
    add("--network", type=float, default=50e9, help="bytes/s of a GPU's card (400 Gb/s)")
    add("--hop_seconds", type=float, default=5e-6, help="latency of a hop in a ring")
    add("--tokens", type=int, default=16384, help="in the micro-batch of a GPU")
    args = parser.parse_args()
    reached = args.flops * args.utilisation
    cluster = Cluster(reached, args.nvlink, args.network, args.hop_seconds)
    print(
        "# Large models on many GPUs, by arithmetic\n\n"
        f"Assumed of a GPU: {args.flops / 1e12:g} TFLOP/s (bfloat16, dense) of which "
        f"{args.utilisation:.0%} are reached, {args.nvlink / 1e9:g} GB/s one way over NVLink in a "
        f"node of {GPUS_PER_NODE}, a network card of {args.network * 8 / 1e9:g} Gb/s, "
        f"{args.hop_seconds * 1e6:g} us per hop. Each runs one micro-batch of {args.tokens} tokens "
        "per step: prompts of 512 tokens with one completion of 56 (SFT) or 8 (GRPO). bfloat16, "
        "gradient checkpointing. Sampling is counted at the same utilisation, which one token at a "
        "time does not reach. Nothing here was measured."
    )
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("SFT", "GRPO"):
            print(f"\n## {stage}\n\n{table(stage, cluster, args.tokens, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
