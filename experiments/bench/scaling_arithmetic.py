r"""Strong and weak scaling on GPUs by arithmetic: a Markdown page with columns to fill in.

    python -m experiments.bench.scaling_arithmetic --flops 400e12 --node_bandwidth 300e9 \
        --network_bandwidth 25e9 --gpus_per_node 8 > scaling.md

The numbers are what the formulas give, not measurements. All are per optimiser step and rank, for
N parameters (all of them sharded) on R ranks.

**Bytes.** A ring all-gather of S bytes over R ranks lets every rank send, and receive, the shards
it lacks: S (R - 1) / R. A reduce-scatter sends the same, an all-reduce is both: 2 S (R - 1) / R.
- FSDP gathers the parameters in bfloat16 (2 bytes) for the forward and again for the backward pass
  of every micro-batch, and scatters the gradients in float32 (4 bytes) once per step:
  (2 + 2) M N (R-1)/R + 4 N (R-1)/R with M micro-batches per rank and step.
- A frozen reference is gathered for its forward pass only, once per micro-batch: 2 M N (R-1)/R.
- GRPO gathers the policy once per rollout phase, in bfloat16, and decodes without communication:
  2 N (R-1)/R.
- HSDP shards inside a node of K ranks and replicates over R/K nodes: in the formulas above K takes
  the place of R, over the links of the node; gradients are then all-reduced between the nodes,
  where each rank holds N/K of them: 2 (4 N / K) (R/K - 1) / (R/K) over the network.

**Compute.** A forward pass costs 2 N FLOP per token and the backward pass 4 N; the prompt is
computed once for its G completions, so a prompt of P tokens with completions of C tokens is
P + G C tokens. GRPO: a forward to sample, a forward of the reference, forward and backward: 10 N
per token. Attention scores, a few per cent at these lengths, and the rest of the step are left out.

**Time.** compute = FLOP / (flops of a GPU, those that are reached); communication = bytes /
bandwidth, where a ring that leaves a node runs at the bandwidth of the network per GPU. If both
overlap completely a step takes the longer one, if they never do their sum; efficiency is
compute / time, as the pair "sum..overlapped". Latency is left out, so small shards are flattered.
Decoding reads the weights from memory for every token and reaches a fraction of `--flops`; its
share is counted here at the full rate, so that compute is a floor and efficiency pessimistic.

Strong scaling: `--prompts` per step whatever R. Weak scaling: `--prompts_per_gpu` on every rank.
"""

import argparse
from dataclasses import dataclass

BF16, FP32 = 2, 4  # bytes
TRAIN_FLOP, FORWARD_FLOP = 6, 2  # per parameter and token


@dataclass(frozen=True)
class Model:
    """Parameters of a decoder; embeddings are counted once if they are tied."""

    name: str
    num_parameters: int


def gpt2(
    name: str, layers: int, width: int, vocabulary: int = 50257, positions: int = 1024
) -> Model:
    """A GPT-2: per block 12 width^2 weights and 13 width biases and norms; tied embeddings."""
    block = 12 * width**2 + 13 * width
    return Model(name, layers * block + (vocabulary + positions) * width + 2 * width)


def llama(name: str, layers: int, width: int, hidden: int, vocabulary: int) -> Model:
    """A Llama without grouped keys: 4 width^2 attention, 3 width hidden MLP, two norms; untied."""
    block = 4 * width**2 + 3 * width * hidden + 2 * width
    return Model(name, layers * block + 2 * vocabulary * width + width)


MODELS = (
    gpt2("GPT-2 small", 12, 768),
    gpt2("GPT-2 large", 36, 1280),
    gpt2("GPT-2 XL", 48, 1600),
    llama("Llama 7B", 32, 4096, 11008, 32000),
)
RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Hardware:
    """What a GPU reaches, and its links: bytes per second that one GPU sends."""

    flops: float
    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int


@dataclass(frozen=True)
class Work:
    """GRPO on summarisation."""

    prompt: int  # tokens
    completion: int  # tokens
    group: int  # completions of a prompt
    tokens_per_micro_batch: int

    @property
    def tokens(self) -> int:
        """Tokens of a prompt with its completions."""
        return self.prompt + self.group * self.completion


def ring_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-gather or reduce-scatter of `size` bytes."""
    return size * (ranks - 1) / ranks


def num_micro_batches(tokens: float, work: Work) -> int:
    """Micro-batches of a rank that has so many tokens, at least one."""
    return max(1, -(-int(tokens) // work.tokens_per_micro_batch))


def sharded_bytes(num_parameters: int, ranks: int, micro_batches: int) -> dict[str, float]:
    """Bytes a rank sends per step over the links of its shard group, by purpose."""
    gathered = ring_bytes(BF16 * num_parameters, ranks)
    return {
        "policy forward and backward": 2 * micro_batches * gathered,
        "reference forward": micro_batches * gathered,
        "rollout copy": gathered,
        "gradients": ring_bytes(FP32 * num_parameters, ranks),
    }


def replica_bytes(num_parameters: int, ranks: int, replicas: int) -> float:
    """Bytes a rank sends per step in the all-reduce of its gradient shard over the replicas."""
    shard = FP32 * num_parameters / (ranks // replicas)
    return 2 * ring_bytes(shard, replicas)


def step_flop(num_parameters: int, tokens: float) -> float:
    """FLOP of a GRPO step: sampling, reference, forward and backward."""
    return (2 * FORWARD_FLOP + TRAIN_FLOP) * num_parameters * tokens


def step_seconds(
    model: Model, ranks: int, prompts_per_rank: float, hardware: Hardware, work: Work, *, hsdp: bool
) -> tuple[float, float, float]:
    """Compute seconds, communication seconds and gigabytes sent, of one rank and step."""
    nodes = -(-ranks // hardware.gpus_per_node)
    replicas = nodes if hsdp else 1
    tokens = prompts_per_rank * work.tokens
    inside = sum(
        sharded_bytes(
            model.num_parameters, ranks // replicas, num_micro_batches(tokens, work)
        ).values()
    )
    between = replica_bytes(model.num_parameters, ranks, replicas)
    leaves_node = nodes > 1 and not hsdp
    bandwidth = hardware.network_bandwidth if leaves_node else hardware.node_bandwidth
    compute = step_flop(model.num_parameters, tokens) / hardware.flops
    communication = inside / bandwidth + between / hardware.network_bandwidth
    return compute, communication, (inside + between) / 1e9


def table(model: Model, hardware: Hardware, work: Work, prompts: float, *, weak: bool) -> str:
    """One model's table; `prompts` is per rank with weak scaling, else of all ranks."""
    kind = f"weak, {prompts:g} prompts per GPU" if weak else f"strong, {prompts:g} prompts per step"
    lines = [
        f"### {model.name}, {model.num_parameters / 1e6:,.0f} M parameters: {kind}",
        "",
        "| GPUs | layout | GB sent | compute s | communication s | efficiency % | "
        "step s by arithmetic | measured step s | measured efficiency % |",
        "|" + " --- |" * 9,
    ]
    for ranks in RANKS:
        per_rank = prompts if weak else prompts / ranks
        layouts = ["FSDP", "HSDP"] if ranks > hardware.gpus_per_node else ["FSDP"]
        for layout in layouts:
            compute, communication, gigabytes = step_seconds(
                model, ranks, per_rank, hardware, work, hsdp=layout == "HSDP"
            )
            total, overlapped = compute + communication, max(compute, communication)
            cells = [
                f"{ranks}",
                layout,
                f"{gigabytes:.3g}",
                f"{compute:.3g}",
                f"{communication:.3g}",
                f"{100 * compute / total:.0f}..{100 * compute / overlapped:.0f}",
                f"{overlapped:.3g}..{total:.3g}",
                "",
                "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--flops", type=float, default=400e12, help="bfloat16 FLOP/s that a GPU reaches")
    add("--node_bandwidth", type=float, default=300e9, help="bytes/s a GPU sends inside a node")
    add("--network_bandwidth", type=float, default=25e9, help="bytes/s a GPU sends between nodes")
    add("--gpus_per_node", type=int, default=8, help="GPUs with fast links")
    add("--prompts", type=int, default=512, help="per step, strong scaling")
    add("--prompts_per_gpu", type=int, default=16, help="per step and GPU, weak scaling")
    add("--group", type=int, default=8, help="completions of a prompt")
    add("--prompt_length", type=int, default=267, help="tokens")
    add("--completion_length", type=int, default=35, help="tokens")
    add("--tokens_per_micro_batch", type=int, default=32768, help="in one forward pass of a GPU")
    args = parser.parse_args()
    hardware = Hardware(args.flops, args.node_bandwidth, args.network_bandwidth, args.gpus_per_node)
    work = Work(args.prompt_length, args.completion_length, args.group, args.tokens_per_micro_batch)
    print(
        "# Scaling of GRPO by arithmetic\n\n"
        f"Per GPU {args.flops / 1e12:g} TFLOP/s reached, {args.node_bandwidth / 1e9:g} GB/s inside "
        f"a node of {args.gpus_per_node}, {args.network_bandwidth / 1e9:g} GB/s between nodes; "
        f"prompts of {args.prompt_length} tokens with {args.group} completions of "
        f"{args.completion_length}. Nothing here was measured; the last two columns are to be "
        "filled. Pairs are without and with communication hidden behind compute."
    )
    for weak, prompts in ((False, args.prompts), (True, args.prompts_per_gpu)):
        print(f"\n## {'Weak' if weak else 'Strong'} scaling")
        for model in MODELS:
            print(f"\n{table(model, hardware, work, prompts, weak=weak)}")


if __name__ == "__main__":
    main()
