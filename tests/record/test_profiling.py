"""Claim: a phase is the seconds of a step, however often it is entered, and a profile shows it.

On a GPU, which these tests replace by one with a clock of its own, a phase is timed by the device
and the loop never waits. A profile is whole files or none, and off it costs and writes nothing.
"""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import launch
from torch.autograd import DeviceType

from common import distributed
from common.config import TrainConfig, UserError, parse
from common.record import metrics
from common.record import profile as profiling
from common.record.glossary import METRICS, SPANS
from common.record.jsonl import read_jsonl
from common.record.metrics import Accumulator, RunLogger
from common.record.profile import StepProfiler, operator_table, phase_table, summary

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that `common.record.metrics` reads, moved by hand."""
    clock = SimpleNamespace(now=100.0)
    read = lambda: clock.now  # noqa: E731
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=read, perf_counter=read))
    return clock


def spend(sums: Accumulator, clock: Any, name: str, seconds: float) -> None:
    with sums.timed(name):
        clock.now += seconds


# --- phases ---


def test_entries_of_a_phase_add_up_per_step(clock: SimpleNamespace) -> None:
    sums = Accumulator("cpu")
    for _ in range(2):  # steps
        spend(sums, clock, "sample_seconds", 8.0)
        for seconds in (1.0, 2.0, 3.0):  # micro-batches
            spend(sums, clock, "update_seconds", seconds)
    sums.add("loss", 12.0, 4)
    assert sums.reduce(num_steps=2) == {"loss": 3.0, "sample_seconds": 8.0, "update_seconds": 6.0}
    assert sums.reduce() == {}


def test_a_phase_of_every_other_step_is_spread_over_all(clock: SimpleNamespace) -> None:
    sums = Accumulator("cpu")
    spend(sums, clock, "reference_seconds", 4.0)
    assert sums.reduce(num_steps=2) == {"reference_seconds": 2.0}


def test_a_phase_inside_another_counts_in_both(clock: SimpleNamespace) -> None:
    sums = Accumulator("cpu")
    with sums.timed("sample_seconds"):
        clock.now += 1.0
        spend(sums, clock, "score_seconds", 2.0)
    assert sums.reduce() == {"sample_seconds": 3.0, "score_seconds": 2.0}


def test_the_log_has_seconds_of_a_step(tmp_path: Path, clock: SimpleNamespace) -> None:
    """The logger knows the number of steps: a loop adds nothing to its calls."""
    sums = Accumulator("cpu")
    run = RunLogger(
        tmp_path, total_steps=9, description="SFT", report_to="none", run_name="", config={}
    )
    for steps in (range(3), range(3, 5)):
        for step in steps:
            for _ in range(4):
                spend(sums, clock, "update_seconds", 0.5)
            clock.now += 1.0
            run.update(step + 1)
        run.log_training(steps[-1] + 1, sums)
        clock.now += 50.0  # evaluation
        run.log(steps[-1] + 1, {"eval_loss": 1.0})
    run.close()
    first, _, second, _ = read_jsonl(tmp_path / "metrics.jsonl")
    for line in (first, second):
        assert line["update_seconds"] == pytest.approx(2.0)
        assert line["step_seconds"] == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["loss", "sample", "step_seconds", "seconds", ""])
def test_a_name_that_is_no_phase_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="not a phase"), Accumulator("cpu").timed(name):
        pytest.fail("the block ran")


def test_every_phase_is_defined() -> None:
    assert set(SPANS) <= set(METRICS)


def reduced_phases() -> dict[str, float]:
    """What this rank is told; the two ranks enter different phases, different numbers of times."""
    sums, clock = Accumulator("cpu"), SimpleNamespace(now=0.0)
    metrics.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[assignment]
    for _ in range([1, 3][distributed.rank()]):
        spend(sums, clock, "update_seconds", [6.0, 4.0][distributed.rank()])
    if distributed.rank() == 1:
        spend(sums, clock, "score_seconds", 8.0)  # rank 0 has none, and does not know of it
    sums.add("loss", 1.0)
    metrics.time = time
    return sums.reduce(num_steps=2)


def test_ranks_with_unequal_numbers_of_entries_agree_on_the_mean(tmp_path: Path) -> None:
    expected = {"loss": 1.0, "score_seconds": 8 / 2 / 2, "update_seconds": (6 + 12) / 2 / 2}
    assert launch(reduced_phases, 2, tmp_path) == [expected, expected]


# --- phases on a GPU ---


class Device:
    """A GPU with a queue: events get the device's time when it comes to them."""

    def __init__(self) -> None:
        self.milliseconds, self.waits = 0.0, 0

    def event(self, enable_timing: bool = False) -> Any:
        assert enable_timing
        event = SimpleNamespace(time=None, passed=False)

        def record() -> None:
            event.time = self.milliseconds

        def synchronize() -> None:
            assert event.time is not None
            self.waits += 1
            event.passed = True

        def elapsed_time(end: Any) -> float:
            assert end.passed, "torch raises here"
            return float(end.time - event.time)

        event.record, event.synchronize, event.elapsed_time = record, synchronize, elapsed_time
        return event


def test_on_a_gpu_the_device_is_timed_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    gpu, sums = Device(), Accumulator("cpu")
    sums._on_gpu = True
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    for milliseconds in (1000.0, 3000.0):
        with sums.timed("update_seconds"):
            clock.now += 0.001  # the host only queues
            gpu.milliseconds += milliseconds
    assert gpu.waits == 0
    assert sums.reduce(num_steps=2) == {"update_seconds": 2.0}
    assert gpu.waits > 0
    assert sums.reduce() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_gpu() -> None:
    sums, x = Accumulator("cuda"), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    with sums.timed("update_seconds"):
        for _ in range(50):
            x @ x
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    assert queued < whole / 2
    assert sums.reduce()["update_seconds"] == pytest.approx(whole, rel=0.3)


# --- labels ---


def test_blocks_are_labelled_only_under_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = []
    record_function = torch.profiler.record_function
    monkeypatch.setattr(
        torch.profiler, "record_function", lambda name: labels.append(name) or record_function(name)
    )
    sums = Accumulator("cpu")
    with sums.timed("sample_seconds"):
        pass
    assert labels == []
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        sums.timed("sample_seconds"),
    ):
        torch.ones(3) + 1
    assert labels == ["sample_seconds"]
    assert "sample_seconds" in {event.key for event in profile.key_averages()}


# --- profiles ---


def config(output_dir: Path, *flags: str) -> TrainConfig:
    return parse(
        TrainConfig, ["--output_dir", str(output_dir), "--model_name_or_path", "m", *flags]
    )


def train(
    profiler: StepProfiler, num_steps: int, *, stop_after: int | None = None
) -> list[list[str]]:
    """A loop of tiny steps: the files there are after each step."""
    sums, layer = Accumulator("cpu"), torch.nn.Linear(64, 64)
    seen = []
    for step in range(num_steps):
        with sums.timed("sample_seconds"), torch.no_grad():
            torch.sin(layer(torch.ones(8, 64)))
        for _ in range(2):
            with sums.timed("update_seconds"):
                layer(torch.ones(8, 64)).sum().backward()
        profiler.step()
        folder = profiler._folder
        seen.append(sorted(p.name for p in folder.iterdir()) if folder and folder.exists() else [])
        torch.cos(torch.ones(3))  # evaluation
        if step + 1 == stop_after:
            break
    profiler.close()
    return seen


def trace_events(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def counts(folder: Path) -> dict[str, int]:
    """How often each label of the host is in the trace."""
    names = [e["name"] for e in trace_events(folder) if e.get("cat") == "user_annotation"]
    return {name: names.count(name) for name in SPANS if name in names}


def row(page: str, name: str) -> list[str]:
    """The cells of a table's row."""
    line = re.search(rf"^\| {re.escape(name)} .*$", page, re.MULTILINE)
    assert line, page
    return [cell.strip() for cell in line.group().strip("|").split("|")]


def test_a_profile_is_a_trace_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = StepProfiler.start(config(tmp_path, "--profile", "true"), 9, start_step=0)
    seen = train(profiler, 9)
    assert seen == [[]] * 4 + [["summary.md", "trace.json"]] * 5  # after two and three steps
    folder = tmp_path / "profile"
    assert counts(folder) == {"sample_seconds": 3, "update_seconds": 6}
    assert capsys.readouterr().out == f"profile: steps 3 to 5 are in {folder}\n"

    page = (folder / "summary.md").read_text()
    assert page.startswith("# Profile of steps 3 to 5\n")
    assert f"- torch: {torch.__version__}\n" in page
    assert len(page.splitlines()) < 60  # one page
    assert row(page, "update")[1] == "2"
    assert row(page, "aten::addmm")[1] == "3"  # of one forward pass each
    # Of shares, no part is more than the whole, and phases with the rest are the whole.
    shares = [float(row(page, name)[3].rstrip("%")) for name in ("sample", "update", "(no phase)")]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert min(shares) > 0
    gflop = re.search(r"whole step: (\S+) GFLOP,", page)
    assert gflop
    # A step: three forward passes of 8 x 64 by 64 x 64, and twice its weights' gradient.
    assert float(gflop.group(1)) == pytest.approx(5 * 2 * 8 * 64 * 64 / 1e9, rel=0.01)


def test_the_profiler_is_gone_after_the_last_recorded_step(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, num_steps=1, skip=1)
    train(profiler, 2)
    assert not torch.autograd._profiler_enabled()
    assert profiler._profile is None
    before = (tmp_path / "trace.json").read_bytes()
    train(profiler, 3)
    assert (tmp_path / "trace.json").read_bytes() == before


@pytest.mark.parametrize(
    ("total_steps", "start_step", "recorded", "title"),
    [
        (4, 0, 2, "steps 3 to 4"),
        (3, 0, 1, "step 3"),
        (2, 0, 1, "step 2"),
        (1, 0, 1, "step 1"),
        (100, 97, 1, "step 100"),
        (100, 90, 3, "steps 93 to 95"),
    ],
)
def test_a_run_with_fewer_steps_records_those_it_has(
    total_steps: int, start_step: int, recorded: int, title: str, tmp_path: Path
) -> None:
    profiler = StepProfiler.start(config(tmp_path, "--profile", "true"), total_steps, start_step)
    train(profiler, total_steps - start_step)
    folder = tmp_path / "profile"
    assert counts(folder) == {"sample_seconds": recorded, "update_seconds": 2 * recorded}
    assert (folder / "summary.md").read_text().startswith(f"# Profile of {title}\n")
    # The evaluation after the last step is not in it.
    cosines = [e for e in trace_events(folder) if e["name"] == "aten::cos"]
    assert len(cosines) == recorded - (total_steps - start_step == 1)


@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_loop_left_in_the_warm_up_leaves_nothing(
    stop_after: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = StepProfiler.start(config(tmp_path, "--profile", "true"), 9, 0)
    train(profiler, 9, stop_after=stop_after)
    assert list(tmp_path.iterdir()) == []
    assert "nothing is written" in capsys.readouterr().out
    assert not torch.autograd._profiler_enabled()


def test_a_loop_left_while_recording_keeps_its_whole_steps(tmp_path: Path) -> None:
    profiler = StepProfiler.start(config(tmp_path, "--profile", "true"), 9, 0)
    train(profiler, 9, stop_after=4)
    assert counts(tmp_path / "profile") == {"sample_seconds": 2, "update_seconds": 4}
    assert "steps 3 to 4" in (tmp_path / "profile" / "summary.md").read_text()


@pytest.mark.parametrize("why", ["off", "other rank", "no steps left"])
def test_off_nothing_is_started_or_written(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: pytest.fail("started"))
    monkeypatch.setattr(profiling, "is_rank0", lambda: why != "other rank")
    flags = [] if why == "off" else ["--profile", "true"]
    start_step = 5 if why == "no steps left" else 0
    train(StepProfiler.start(config(tmp_path, *flags), 5, start_step), 5)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.json").write_text("old")

    def fail(_: Any, path: str) -> None:
        Path(path).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    with pytest.raises(OSError, match="disk full"):
        train(StepProfiler(tmp_path, num_steps=1, skip=0), 1)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("trace.json", "old")]


def test_no_steps_to_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--profile_steps is 0"):
        config(tmp_path, "--profile_steps", "0")


# --- the page ---


def event(key: str, **values: Any) -> SimpleNamespace:
    nothing = {
        "count": 2,
        "device_type": DeviceType.CPU,
        "is_user_annotation": False,
        "self_cpu_time_total": 0.0,
        "cpu_time_total": 0.0,
        "self_device_time_total": 0.0,
        "device_time_total": 0.0,
        "flops": 0,
    }
    return SimpleNamespace(key=key, **(nothing | values))


def test_on_a_gpu_the_page_counts_each_kernel_once() -> None:
    """Times in microseconds, of two steps of a second: an operator has its kernels' time too."""
    on_gpu: dict[str, Any] = {"device_type": DeviceType.CUDA}
    events = [
        event("ProfilerStep*", is_user_annotation=True, self_cpu_time_total=9e5),
        event("update_seconds", is_user_annotation=True, cpu_time_total=5e5),
        event("update_seconds", is_user_annotation=True, device_time_total=1.6e6, **on_gpu),
        event("aten::mm", self_cpu_time_total=1e5, self_device_time_total=1.2e6, flops=int(3e12)),
        event("aten::add", self_cpu_time_total=2e5, self_device_time_total=3e5),
        event("gemm_kernel", self_device_time_total=1.2e6, device_time_total=1.2e6, **on_gpu),
        event("add_kernel", self_device_time_total=3e5, device_time_total=3e5, **on_gpu),
    ]
    page = summary(events, title="Profile", seconds=2.0, num_steps=2)
    assert "- GPU kernels and copies: 75.0% of the step\n" in page
    assert "- matrix multiplications: 80.0% of GPU time\n" in page
    assert "- their speed: 2,500 GFLOP/s\n" in page
    assert "whole step: 1,500 GFLOP, 1,500 GFLOP/s" in page
    assert row(page, "update") == ["update", "1", "0.25", "25.0%", "0.8"]
    assert row(page, "(no phase)")[2:4] == ["0.75", "75.0%"]
    on_cpu, on_device = page.split("## ")[2:4]
    assert row(on_cpu, "aten::add") == ["aten::add", "1", "100", "10.0%"]
    assert on_cpu.index("aten::add") < on_cpu.index("aten::mm")
    assert row(on_device, "aten::mm") == ["aten::mm", "1", "600", "80.0%"]
    assert "kernel " not in page.split("## Operators", 1)[1].replace("GPU kernels", "")
    assert "ProfilerStep" not in page


def test_tables_without_a_gpu_or_a_phase() -> None:
    assert phase_table([], 1.0, 1).splitlines()[2].split("|")[1].strip() == "(no phase)"
    assert "GPU" not in phase_table([], 1.0, 1)
    many = [event(f"op{i}", self_cpu_time_total=float(i)) for i in range(40)]
    table = operator_table(many, "self_cpu_time_total", 1.0, 1, "of the step").splitlines()
    assert len(table) == 2 + 15
    assert "op39" in table[2]
