"""Time of a step by phase and operator: a few steps under torch.profiler.

With `--profile_steps 3` rank 0 records so many steps after two of warm-up and writes, into
`output_dir/profile`, `trace.json` (for https://ui.perfetto.dev or chrome://tracing) and
`summary.md`. The labelled phases are those of `Accumulator.timed`.
"""

from pathlib import Path
from typing import Any

import torch

from common.config.stages import TrainConfig
from common.record.jsonl import replacing

WARMUP_STEPS = 2  # allocators fill, kernels are chosen; in the second the profiler gets ready
NUM_ROWS = 25  # of a table


def start_profiler(config: TrainConfig, num_left: int, start_step: int) -> Any:
    """A started `torch.profiler.profile`; its `step` ends a step and writes after the last one.

    Time between that call and the next step, such as an evaluation, counts for the next step. A run
    with `num_left` steps left, at least 1, records fewer than `profile_steps` if it must, and a
    single one without warm-up. Earlier launches made `start_step` steps.
    """
    skip = min(WARMUP_STEPS, num_left - 1)
    num_steps = min(config.profile_steps, num_left - skip)
    first, last = start_step + skip + 1, start_step + skip + num_steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    folder = Path(config.output_dir) / "profile"

    def write(profile: torch.profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "trace.json") as file:
            profile.export_chrome_trace(str(file))
        with replacing(folder / "summary.md") as file:
            file.write_text(f"# Profile of {steps}\n\n{tables(profile)}", encoding="utf-8")
        print(f"profile: {steps} are in {folder}", flush=True)

    warm = min(1, skip)
    schedule = torch.profiler.schedule(wait=skip - warm, warmup=warm, active=num_steps, repeat=1)
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=write, with_flops=True)
    profile.start()
    return profile


def tables(profile: torch.profiler.profile) -> str:
    """Tables of the slowest operators and phases; on a GPU also of its kernels."""
    events = profile.key_averages()
    orders = ["cpu_time_total"] + ["self_cuda_time_total"] * torch.cuda.is_available()
    texts = [events.table(sort_by=order, row_limit=NUM_ROWS) for order in orders]
    return (
        "The profiler itself slows a step: compare shares, and take seconds from metrics.jsonl. On "
        "a GPU the host runs ahead, so that a phase may end before its kernels do.\n\n"
        + "\n".join(f"```\n{table.strip()}\n```\n" for table in texts)
    )
