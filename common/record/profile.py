"""Where the time of a step goes: a few steps under torch.profiler, as a trace and as one page.

With `--profile true` rank 0 records `profile_steps` steps after two of warm-up and writes, into
`output_dir/profile`, `trace.json` (for https://ui.perfetto.dev or chrome://tracing) and
`summary.md`. The labelled phases are the spans of `Accumulator.timed`.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # exists, is not re-exported
from torch.profiler import ProfilerAction, ProfilerActivity

from common.config import TrainConfig
from common.distributed import is_rank0, local_peak_memory_gb, print_rank0, world_size
from common.record.glossary import SPANS
from common.record.terminal import NOT_MEASURED, format_number, markdown_table

WARMUP_STEPS = 2  # allocators fill, kernels are chosen; in the second the profiler gets ready
NUM_OPERATORS = 15  # rows of a table of operators
# The multiplications whose operations torch.profiler counts; fused attention is not among them.
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class StepProfiler:
    """Records some steps of a loop. Call it on every rank: rank 0 works, others do nothing.

    No call is a collective. While it records, steps are slower; one pause writes the files, and
    after it, as on the other ranks and without `--profile`, `step` returns at once.
    """

    def __init__(
        self, folder: Path | None, *, num_steps: int = 0, skip: int = 0, start_step: int = 0
    ) -> None:
        """Get ready, but record nothing yet unless `skip` is 0.

        Args:
            folder: gets the files, made when they are written; None: do nothing at all.
            num_steps: steps to record.
            skip: steps before them.
            start_step: steps that earlier launches made.
        """
        self._folder = folder
        self._num_steps, self._skip, self._start_step = num_steps, skip, start_step
        self._num_done = 0  # calls of `step`
        self._profile: Any = None
        self._mark = 0.0
        if folder is None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities, schedule=self._action, with_flops=True
        )
        self._profile.start()
        if skip == 0:
            self._mark = wait_and_read_clock()

    @classmethod
    def start(cls, config: TrainConfig, total_steps: int, start_step: int) -> "StepProfiler":
        """The profiler of a training run, right before its loop.

        A run with fewer steps left than asked for records those it has, and of a single step that
        one, without warm-up.
        """
        num_left = total_steps - start_step
        if not config.profile or not is_rank0() or num_left <= 0:
            return cls(None)
        skip = min(WARMUP_STEPS, num_left - 1)
        return cls(
            Path(config.output_dir) / "profile",
            num_steps=min(config.profile_steps, num_left - skip),
            skip=skip,
            start_step=start_step,
        )

    def step(self) -> None:
        """End a step; after the last that is recorded, write the files.

        Call it right after the optimiser step: what lies between it and the next step, such as an
        evaluation, counts as the next step's.
        """
        if self._profile is None:
            return
        self._num_done += 1
        if self._num_done == self._skip + self._num_steps:
            self._finish(self._num_steps)
            return
        self._profile.step()
        if self._num_done == self._skip:
            self._mark = wait_and_read_clock()

    def close(self) -> None:
        """End a recording that the loop left early; write it if it has a whole step."""
        if self._profile is not None:
            self._finish(self._num_done - self._skip)

    def _action(self, step: int) -> ProfilerAction:
        """The schedule: tracing gets ready one step early, which the first start takes."""
        if step < self._skip - 1:
            return ProfilerAction.NONE
        return ProfilerAction.WARMUP if step < self._skip else ProfilerAction.RECORD

    def _finish(self, num_recorded: int) -> None:
        seconds = wait_and_read_clock() - self._mark
        profile, self._profile = self._profile, None
        profile.stop()
        if num_recorded < 1:
            print_rank0("profile: the run ended before a step was recorded; nothing is written.")
            return
        assert self._folder is not None
        first = self._start_step + self._skip + 1
        steps = f"{first}" if num_recorded == 1 else f"{first} to {first + num_recorded - 1}"
        page = summary(
            profile.key_averages(),
            title=f"Profile of {'step' if num_recorded == 1 else 'steps'} {steps}",
            seconds=seconds,
            num_steps=num_recorded,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / "trace.json", lambda path: profile.export_chrome_trace(path))
        write_whole(
            self._folder / "summary.md",
            lambda path: Path(path).write_text(page, encoding="utf-8"),
        )
        print_rank0(f"profile: steps {steps} are in {self._folder}")


def summary(events: Sequence[Any], *, title: str, seconds: float, num_steps: int) -> str:
    """One page of Markdown about a recording.

    Args:
        events: what `torch.profiler.profile.key_averages` returns; its times are microseconds.
        title: of the page.
        seconds: wall time of the recorded steps together.
        num_steps: how many were recorded.
    """
    operators = [e for e in events if e.device_type == DeviceType.CPU and not e.is_user_annotation]
    kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    device_seconds = sum(e.self_device_time_total for e in kernels) / 1e6
    facts = [
        ("machine", machine()),
        ("torch", torch.__version__),
        ("processes", str(world_size())),
        ("seconds per step", format_number(seconds / num_steps)),
        ("peak memory of this process", f"{format_number(local_peak_memory_gb())} GB"),
    ]
    if kernels:
        facts.append(("GPU kernels and copies", f"{percent(device_seconds, seconds)} of the step"))
    facts += matmul_facts(operators, seconds, num_steps, device_seconds)
    parts = [
        f"# {title}",
        "\n".join(f"- {name}: {value}" for name, value in facts),
        "The profiler itself slows a step: compare shares, and take seconds from metrics.jsonl.",
        "## Phases",
        phase_table(events, seconds, num_steps),
        "## Operators by their own time on the CPU",
        operator_table(operators, "self_cpu_time_total", seconds, num_steps, "of the step"),
    ]
    if kernels:
        parts += [
            "## Operators by the time of their own GPU kernels",
            operator_table(
                operators, "self_device_time_total", device_seconds, num_steps, "of GPU time"
            ),
        ]
    return "\n\n".join(parts) + "\n"


def phase_table(events: Sequence[Any], seconds: float, num_steps: int) -> str:
    """The spans that were entered, and what no span covers, as wall time on the host.

    On a GPU the host runs ahead: a span may end before its kernels do, and the next one wait for
    them. The last column, from a span's first kernel to its last, shows that.
    """
    on_host = {e.key: e for e in events if e.device_type == DeviceType.CPU and e.key in SPANS}
    on_device = {e.key: e for e in events if e.device_type != DeviceType.CPU and e.key in SPANS}
    rows, labelled = [], 0.0
    for name in SPANS:
        if name not in on_host:
            continue
        host = on_host[name].cpu_time_total / 1e6
        labelled += host
        device = on_device[name].device_time_total / 1e6 / num_steps if name in on_device else None
        rows.append(
            [
                name.removesuffix("_seconds"),
                format_number(on_host[name].count / num_steps),
                format_number(host / num_steps),
                percent(host, seconds),
                NOT_MEASURED if device is None else format_number(device),
            ]
        )
    rest = max(0.0, seconds - labelled)
    rows.append(
        ["(no phase)", NOT_MEASURED, format_number(rest / num_steps), percent(rest, seconds)]
        + [NOT_MEASURED]
    )
    headers = ["phase", "entries per step", "seconds per step", "share", "GPU seconds per step"]
    width = len(headers) if on_device else len(headers) - 1
    return markdown_table(headers[:width], [row[:width] for row in rows])


def operator_table(
    operators: Sequence[Any], field: str, seconds: float, num_steps: int, share_of: str
) -> str:
    """The operators with the largest `field`, as milliseconds of a step and as shares."""
    largest = sorted(operators, key=lambda e: getattr(e, field), reverse=True)[:NUM_OPERATORS]
    rows = [
        [
            e.key[:60],
            format_number(e.count / num_steps),
            format_number(getattr(e, field) / 1e3 / num_steps),
            percent(getattr(e, field) / 1e6, seconds),
        ]
        for e in largest
        if getattr(e, field) > 0
    ]
    return markdown_table(["operator", "calls per step", "ms per step", share_of], rows)


def matmul_facts(
    operators: Sequence[Any], seconds: float, num_steps: int, device_seconds: float
) -> list[tuple[str, str]]:
    """How much of the time are matrix multiplications, and how fast they are; [] without any."""
    matmuls = [e for e in operators if e.key in MATMULS]
    field = "self_device_time_total" if device_seconds else "self_cpu_time_total"
    busy = sum(getattr(e, field) for e in matmuls) / 1e6
    if not busy:
        return []
    whole, name = (device_seconds, "GPU time") if device_seconds else (seconds, "the step")
    facts = [("matrix multiplications", f"{percent(busy, whole)} of {name}")]
    flops = sum(e.flops or 0 for e in matmuls)
    if flops:
        facts += [
            ("their speed", f"{format_number(flops / busy / 1e9)} GFLOP/s"),
            (
                "their operations over the whole step",
                f"{format_number(flops / num_steps / 1e9)} GFLOP, "
                f"{format_number(flops / seconds / 1e9)} GFLOP/s (fused attention not counted)",
            ),
        ]
    return facts


def percent(part: float, whole: float) -> str:
    """`part` of `whole` as a percentage."""
    return f"{100 * part / whole:.1f}%" if whole else NOT_MEASURED


def machine() -> str:
    """What this process computes on."""
    cpu = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs "
        f"({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads"
    )
    return f"{torch.cuda.get_device_name()}; {cpu}" if torch.cuda.is_available() else cpu


def wait_and_read_clock() -> float:
    """Seconds of a clock, read when the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def write_whole(path: Path, write: Callable[[str], Any]) -> None:
    """Let `write` fill a file beside `path`, then put it there: `path` is never half a file."""
    aside = path.with_name(f".{path.name}.part")
    try:
        write(str(aside))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
