"""How cost grows: with the group, with the prompt, with the vocabulary, with the processes.

    python -m experiments.bench.scaling        # prints Markdown, writes output/bench/scaling.json

One thread, float32, a random GPT-2 of 4 layers, 256 wide. A figure is the median of `REPEATS` calls
after a warm-up call; peak memory is that of a process of its own.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from experiments.bench import processes

REPEATS = 3
COMPLETION, PROMPT = 35, 267  # tokens, means of TL;DR
GROUPS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (64, 128, 256, 512, 1024)
VOCABULARIES = (4096, 50257)
NUM_MEMORY_COMPLETIONS = 64


def main() -> None:
    """Measure everything, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fixture", type=Path, default=Path("output/bench/tiny/fixture"))
    parser.add_argument("--vocabulary", type=int, help="only make the update that memory() weighs")
    parser.add_argument("--whole", action="store_true", help="... and keep all logits")
    arguments = parser.parse_args()
    if arguments.vocabulary:
        update(arguments.vocabulary, NUM_MEMORY_COMPLETIONS, PROMPT, whole=arguments.whole)()
        return
    results = {  # other processes first: they inherit the size of this one as their peak
        "memory": {v: memory(v) for v in VOCABULARIES},
        "ranks": {n: ranks(n, arguments.fixture) for n in (1, 2)},
        "group": {g: costs(g, PROMPT) for g in GROUPS},
        "prompt": {p: costs(8, p) for p in PROMPTS},
    }
    folder = processes.REPOSITORY / "output" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")
    for title, rows in (
        (f"A group of G completions of {COMPLETION} tokens, prompt of {PROMPT}", results["group"]),
        (f"8 completions of {COMPLETION} tokens, prompt of P", results["prompt"]),
        (f"Vocabulary, {NUM_MEMORY_COMPLETIONS} completions: peak memory, MB", results["memory"]),
        ("Processes, one thread each: SFT, 16 rows per step", results["ranks"]),
    ):
        print(f"\n{title}\n\n{table(rows)}")


def costs(group: int, prompt: int) -> dict[str, float]:
    """Seconds of an update in either layout, and of sampling 35 tokens for every completion."""
    updates, padded = update(4096, group, prompt), None
    if group <= 64:  # 128 rows of 300 tokens take gigabytes
        padded = update(4096, group, prompt, layout="padded")
    row = {"update s": seconds(updates)}
    if padded:
        row["padded s"] = seconds(padded)
        row["ratio"] = row["padded s"] / row["update s"]
    shared, copying = (sampling(group, prompt, layout) for layout in ("shared_prefix", "padded"))
    return row | {"sampling s": shared, "copied cache s": copying}


def seconds(call: Callable[[], object]) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def model(vocabulary: int, num_positions: int) -> Any:
    """A random GPT-2 that takes both layouts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from common import distributed
    from common.config import CommonConfig
    from common.model import fsdp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.start()
    shape = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": num_positions}
    special = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": vocabulary}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    lm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", **shape, **special, **dropout)
    )
    fsdp.prepare(lm, CommonConfig(output_dir="unused"))
    return lm


def texts(group: int, prompt: int) -> tuple[list[int], list[list[int]]]:
    """A prompt and a group of completions, any tokens."""
    ids = [1 + (7 * i) % 4000 for i in range(prompt)]
    return ids, [[1 + (11 * i + k) % 4000 for i in range(COMPLETION)] for k in range(group)]


def update(
    vocabulary: int,
    group: int,
    prompt: int,
    *,
    layout: str = "shared_prefix",
    whole: bool = False,
) -> Callable[[], object]:
    """A forward and a backward pass through the log-probabilities of a group."""
    from common.model import projection
    from common.padding import MAKERS
    from common.scoring import Policy

    if whole:
        projection.token_statistics.__kwdefaults__["chunk_numbers"] = 2**62
    policy = Policy(model(vocabulary, prompt + COMPLETION))
    ids, completions = texts(group, prompt)
    batch = MAKERS[layout]([ids], [completions], 0)

    def call() -> None:
        policy(batch).token_logps.sum().backward()
        policy.zero_grad(set_to_none=True)

    return call


def sampling(group: int, prompt: int, layout: str) -> float:
    """Seconds to prefill and decode 35 tokens for each sample of a group; nothing stops earlier."""
    import torch

    from common.model import replica
    from common.sampling.decode import Settings, decode
    from common.sampling.sampler import uniforms

    lm = model(4096, prompt + COMPLETION).eval().requires_grad_(False)
    ids, _ = texts(1, prompt)

    @torch.no_grad()
    def call() -> None:
        noise = uniforms(0, torch.tensor([0]), range(group), COMPLETION)
        decode(lm, [ids], noise, Settings(stop_ids=[], pad_id=0, layout=layout))

    with replica.packed(lm) if layout == "shared_prefix" else nullcontext():
        return seconds(call)


def memory(vocabulary: int) -> dict[str, float]:
    """Peak memory of an update in MB, with the logits in chunks and with all of them kept."""
    command = ["-m", "experiments.bench.scaling", "--vocabulary"]
    folder = processes.REPOSITORY / "output" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    row = {}
    for name, flags in (("in chunks", []), ("all logits", ["--whole"])):
        log = folder / f"memory-{vocabulary}.log"
        row[name] = processes.run([*command, str(vocabulary), *flags], log, threads=1)
    return row


def ranks(num_ranks: int, fixture: Path) -> dict[str, float]:
    """Seconds of a step of SFT, split over processes."""
    output_dir = processes.REPOSITORY / "output" / "bench" / f"ranks-{num_ranks}"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    flags: dict[str, Any] = {
        "model_name_or_path": fixture / "policy",
        "dataset_name": fixture / "data" / "sft-16.jsonl",
        "dataset_test_split": "",
        "output_dir": output_dir,
        "batch_size": 16,
        "max_steps": 2 + REPEATS,
        "logging_steps": 1,
        "max_prompt_length": 384,
        "micro_batch_tokens": 1024,
        "num_sample_prompts": 0,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    processes.run([*command, "train_sft.py", *arguments], output_dir.with_suffix(".log"), threads=1)
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line).get("step_seconds") for line in lines]
    return {"step s": median([step for step in steps if step is not None][2:])}


def table(rows: dict[int, dict[str, float]]) -> str:
    """Markdown, a line per row; a figure that was not measured stays empty."""
    columns: list[str] = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| | {' | '.join(columns)} |", f"|---:|{'---:|' * len(columns)}"]
    for key, row in rows.items():
        cells = [figure(row.get(name)) for name in columns]
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(value: float | None) -> str:
    """Three digits."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
