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
import tiny
import torch

from common import distributed
from common.checkpoint import hf_folder
from common.config.parser import parse
from common.config.stages import SFTConfig, TrainConfig
from common.errors import UserError
from common.record import logger as run_logger
from common.record import metrics
from common.record.jsonl import read_jsonl
from common.record.logger import RunLogger
from common.record.metrics import PHASES, Accumulator
from common.record.profile import start_profiler
from common.run import Run

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that metrics and logger read, moved by hand."""
    clock = SimpleNamespace(now=100.0)
    read = lambda: clock.now  # noqa: E731
    for module in (metrics, run_logger):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=read, perf_counter=read))
    return clock


def spend(sums: Accumulator, clock: Any, name: str, seconds: float) -> None:
    with sums.timed(name):
        clock.now += seconds


# --- phases ---


def test_entries_of_a_phase_add_up_per_step(clock: SimpleNamespace) -> None:
    sums = Accumulator("cpu")
    for _ in range(2):  # steps
        with sums.timed("sample_seconds"):  # a phase inside another counts in both
            clock.now += 1.0
            spend(sums, clock, "score_seconds", 7.0)
        for seconds in (1.0, 2.0, 3.0):  # micro-batches
            spend(sums, clock, "update_seconds", seconds)
    spend(sums, clock, "reference_seconds", 4.0)  # in one of the two steps
    sums.add("loss", 12.0, 4)
    phases = {"reference_seconds": 2.0, "sample_seconds": 8.0, "update_seconds": 6.0}
    assert sums.reduce(num_steps=2) == {"loss": 3.0, "score_seconds": 7.0, **phases}
    assert sums.reduce() == {}


def test_the_log_has_seconds_of_a_step(tmp_path: Path, clock: SimpleNamespace) -> None:
    """The logger knows the number of steps: a loop adds nothing to its calls."""
    sums = Accumulator("cpu")
    run = RunLogger(config(tmp_path), 9)
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
    """Under one they are: `test_a_profile_is_a_trace_and_a_page` counts the labels."""
    monkeypatch.setattr(torch.profiler, "record_function", pytest.fail)
    with Accumulator("cpu").timed("sample_seconds"):
        pass


# --- profiles ---


def config(output_dir: Path, *flags: str) -> TrainConfig:
    return parse(SFTConfig, ["--output_dir", str(output_dir), "--model_name_or_path", "m", *flags])


def train(folder: Path, num_steps: int, start_step: int = 0) -> list[list[str]]:
    """A loop of tiny steps: the files there are after each step."""
    profiler = start_profiler(config(folder, "--profile", "true"), num_steps, start_step)
    sums, layer = Accumulator("cpu"), torch.nn.Linear(64, 64)
    seen = []
    for _ in range(num_steps):
        with sums.timed("sample_seconds"), torch.no_grad():
            torch.sin(layer(torch.ones(8, 64)))
        for _ in range(2):
            with sums.timed("update_seconds"):
                layer(torch.ones(8, 64)).sum().backward()
        profiler.step()
        seen.append(sorted(path.name for path in (folder / "profile").glob("*")))
        torch.cos(torch.ones(3))  # evaluation
    return seen


def trace_events(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def counts(folder: Path) -> dict[str, int]:
    """How often each label of the host is in the trace."""
    names = [e["name"] for e in trace_events(folder) if e.get("cat") == "user_annotation"]
    return {name: names.count(name) for name in PHASES if name in names}


def row(page: str, name: str) -> list[str]:
    """The cells of a table's row behind its name."""
    line = re.search(rf"^ *{re.escape(name)} .*$", page, re.MULTILINE)
    assert line, page
    return line.group().split()[1:]


def test_a_profile_is_a_trace_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = train(tmp_path, 9)
    assert seen == [[]] * 4 + [["summary.md", "trace.json"]] * 5  # after two and three steps
    assert not torch.autograd._profiler_enabled()
    folder = tmp_path / "profile"
    assert counts(folder) == {"sample_seconds": 3, "update_seconds": 6}
    assert capsys.readouterr().out == f"profile: steps 3 to 5 are in {folder}\n"

    page = (folder / "summary.md").read_text()
    assert page.startswith("# Profile of steps 3 to 5\n")
    assert len(page.splitlines()) < 60  # one page
    assert row(page, "update_seconds")[-2] == "6"  # in three steps
    phases = ("sample_seconds", "update_seconds")
    shares = [float(row(page, name)[2].rstrip("%")) for name in phases]
    assert min(shares) > 0
    assert sum(shares) <= float(row(page, "ProfilerStep*")[2].rstrip("%")) == 100
    addmm = row(page, "aten::addmm")
    assert float(addmm[-2]) == 3 * 3  # forward passes of three steps
    # 8 x 64 by 64 x 64, in units of a thousand operations
    assert float(addmm[-1]) == pytest.approx(9 * 2 * 8 * 64 * 64 / 1e3, rel=0.01)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # of the single step
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
    train(tmp_path, total_steps - start_step, start_step)
    folder = tmp_path / "profile"
    assert counts(folder) == {"sample_seconds": recorded, "update_seconds": 2 * recorded}
    assert (folder / "summary.md").read_text().startswith(f"# Profile of {title}\n")
    # The evaluation after the last step is not in it.
    cosines = [e for e in trace_events(folder) if e["name"] == "aten::cos"]
    assert len(cosines) == recorded - (total_steps - start_step == 1)


@pytest.mark.parametrize("why", ["off", "other rank", "no steps left"])
def test_off_nothing_is_started(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_rank0", lambda: why != "other rank")
    order: Any = SimpleNamespace(total_steps=lambda _: 0 if why == "no steps left" else 5)
    flags = [] if why == "off" else ["--profile", "true"]
    monkeypatch.setattr(hf_folder, "settings_of", lambda *_: {})
    module: Any = torch.nn.Linear(2, 2)
    module.lm = module
    run = Run(module, order, config(tmp_path, *flags), None, tiny.vocabulary())
    assert run.profiler is None


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "trace.json").write_text("old")

    def fail(_: Any, path: str) -> None:
        Path(path).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    with pytest.raises(OSError, match="disk full"):
        train(tmp_path, 2)
    found = [(path.name, path.read_text()) for path in (tmp_path / "profile").iterdir()]
    assert found == [("trace.json", "old")]


def test_no_steps_to_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--profile_steps is 0"):
        config(tmp_path, "--profile_steps", "0")
