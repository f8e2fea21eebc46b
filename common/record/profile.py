"""Where the time of a step goes: a few steps under torch.profiler, as a trace and as tables.

With `--profile true` rank 0 records `profile_steps` steps after two of warm-up and writes, into
`output_dir/profile`, `trace.json` (for https://ui.perfetto.dev or chrome://tracing) and
`summary.md`. The labelled phases are those of `Accumulator.timed`.
"""

from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # exists, is not re-exported

from common.config import TrainConfig
from common.record.jsonl import replacing
from common.record.metrics import PHASES
from common.record.terminal import format_number, markdown_table

WARMUP_STEPS = 2  # allocators fill, kernels are chosen; in the second the profiler gets ready
NUM_OPERATORS = 15  # rows of a table of operators


def start_profiler(config: TrainConfig, num_left: int, start_step: int) -> Any:
    """A started `torch.profiler.profile`; its `step` ends a step, and writes behind the last one.

    What lies between that call and the next step, such as an evaluation, counts as the next step's.

    Of `num_left` steps to make, at least 1 and perhaps fewer than asked for, those there are are
    recorded, a single one without warm-up; `start_step` were made by earlier launches.
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
            file.write_text(f"# Profile of {steps}\n\n{summary(profile)}", encoding="utf-8")
        print(f"profile: {steps} are in {folder}", flush=True)

    warm = min(1, skip)
    schedule = torch.profiler.schedule(wait=skip - warm, warmup=warm, active=num_steps, repeat=1)
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=write, with_flops=True)
    profile.start()
    return profile


def summary(profile: torch.profiler.profile) -> str:
    """The phases of a step, and torch's tables of the operators that take longest."""
    events = profile.key_averages()
    of_host = {event.key: event for event in events if event.device_type == DeviceType.CPU}
    whole = of_host["ProfilerStep*"]
    rows = [
        [
            "the step" if event is whole else event.key.removesuffix("_seconds"),
            format_number(event.count / whole.count),
            format_number(event.cpu_time_total / whole.count / 1e6),
            f"{100 * event.cpu_time_total / whole.cpu_time_total:.1f}%",
        ]
        for event in (whole, *(of_host[name] for name in PHASES if name in of_host))
    ]
    parts = [
        "The profiler itself slows a step: compare shares, and take seconds from metrics.jsonl. On "
        "a GPU the host runs ahead, so that a phase may end before its kernels do.",
        markdown_table(["phase", "entries per step", "seconds per step", "share"], rows),
    ]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        table = events.table(sort_by=f"self_{device}_time_total", row_limit=NUM_OPERATORS)
        parts.append(f"Operators by their own time, {device}:\n\n```\n{table.strip()}\n```")
    return "\n\n".join(parts) + "\n"
