"""How long a checkpoint holds up training: written at once, or from a copy while training goes on.

    python -m experiments.bench.saving

A GPT-2 of 12 layers, 768 wide (random weights) makes SFT steps of 8 x 128 tokens on one process and
saves before each but the first. Printed are medians over the steps; and the memory that a save
takes beside what is there, while nothing else goes on, in units of what is written (Linux).
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import distributed
from common.checkpoint import files
from common.checkpoint.saver import Checkpointer
from common.config import TrainConfig
from common.model import fsdp, optim, shared_prefix
from common.padding import shared_prefix_batch
from common.record.metrics import Accumulator
from common.scoring import Policy

TOKENS = 128


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    arguments = parser.parse_args()
    distributed.start()
    distributed.seed_everything(0)
    shape = {
        "n_layer": arguments.layers,
        "n_embd": arguments.width,
        "n_head": arguments.width // 64,
    }
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape))
    shared_prefix.use_shared_prefix(lm, fsdp.blocks(lm)[-1])
    print("| saving | save() returns after | step that follows | step alone | size | memory |")
    print("|---|---|---|---|---|---|")
    for is_async in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(lm, Path(folder), is_async, arguments.steps)
        held, after, alone, size, more = found
        name = "while training goes on" if is_async else "at once"
        times = f"{held:.2f} s | {after:.2f} s | {alone:.2f} s"
        print(f"| {name} | {times} | {size / 1e9:.2f} GB | {more / size:.2f} |")


def resident(name: str) -> int:
    """Bytes of this process that are in memory (`VmRSS`), or the most that were (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(
    lm: torch.nn.Module, folder: Path, is_async: bool, num_steps: int
) -> tuple[float, float, float, int, int]:
    """Medians in seconds: of `save`, of the step after it, of a step without.

    Then bytes: written, and of memory beside what is there.
    """
    config = TrainConfig(
        output_dir=str(folder), model_name_or_path="unused", async_save=is_async, keep_last=1
    )
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    optimizer = optim.build_optimizer(policy, config)
    saver = Checkpointer(config, policy, optimizer, Accumulator("cpu"))
    rows = [[i] * TOKENS for i in range(8)]
    batch = shared_prefix_batch([[1]] * len(rows), [[row] for row in rows], 0)

    def step() -> float:
        began = time.perf_counter()
        policy(batch).token_logps.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    step()
    alone, held, after = [], [], []
    for number in range(1, num_steps + 1):
        alone.append(step())
        began = time.perf_counter()
        saver.save(number)
        held.append(time.perf_counter() - began)
        after.append(step())
        saver.wait()
    written = files.folder_of(folder, num_steps)
    size = sum(file.stat().st_size for file in written.iterdir())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    saver.save(num_steps + 1)
    saver.wait()
    more = resident("VmHWM") - before
    saver.close()
    return median(held), median(after), median(alone), size, more


if __name__ == "__main__":
    main()
