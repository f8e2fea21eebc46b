"""Watching shows what the files say, while they grow, are cut back or are not there yet."""

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.record import watch
from common.record.glossary import recorded
from common.record.watch import (
    Run,
    duration,
    find_runs,
    picture,
    seconds_per_step,
    sparkline,
    total_steps,
)

ROOT = Path(__file__).resolve().parents[2]


def append(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def run_of(folder: Path, config: str = "max_steps: 40\n", *records: dict[str, Any]) -> Run:
    append(folder / "metrics.jsonl", *records)
    (folder / "config.yaml").write_text(config)
    run = Run(folder, folder.name)
    run.read()
    return run


# --- files ---


def test_new_lines_are_read_and_a_torn_one_waits(tmp_path: Path) -> None:
    run = Run(tmp_path, "run")
    run.read()
    assert run.metrics == []
    path = append(tmp_path / "metrics.jsonl", {"step": 1, "text": "\u2028é"})
    with path.open("ab") as half:
        half.write('{"step": 2, "text": "é'.encode()[:-1])
    run.read()
    run.read()
    assert run.metrics == [{"step": 1, "text": "\u2028é"}]
    with path.open("ab") as half:
        half.write('é"}\n'.encode()[1:])
    run.read()
    assert [record["step"] for record in run.metrics] == [1, 2]


def test_a_resumed_run_is_read_again(tmp_path: Path) -> None:
    path = append(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2}, {"step": 3})
    run = Run(tmp_path, "run")
    run.read()
    shorter = append(tmp_path / "new", {"step": 1}, {"step": 22222222}, {"step": 33333333})
    shorter.replace(path)  # longer than what was read, but another file
    run.read()
    assert [record["step"] for record in run.metrics] == [1, 22222222, 33333333]
    path.write_text('{"step": 9}\n')  # the same file, cut
    run.read()
    assert [record["step"] for record in run.metrics] == [9]


def test_runs_are_found_below_a_folder_in_the_order_they_began(tmp_path: Path) -> None:
    assert find_runs([tmp_path / "demo"]) == [(tmp_path / "demo", "demo")]
    for number, name in enumerate(("sft", "dpo", "seed_0/grpo")):
        run_of(tmp_path / "demo" / name)
        os.utime(tmp_path / "demo" / name / "config.yaml", (number, number))
    run_of(tmp_path / "demo/sft/checkpoints")  # a copy inside a run is no run
    found = [name for _, name in find_runs([tmp_path / "demo"])]
    assert found == ["sft", "dpo", "seed_0/grpo"]
    assert find_runs([tmp_path / "demo" / "dpo"]) == [(tmp_path / "demo" / "dpo", "dpo")]


def test_the_runs_of_a_driver_are_found_below_it(tmp_path: Path) -> None:
    """A sweep has a config of its own, and its runs lie three folders below."""
    for run in ("seed_0/base/sft", "seed_0/base/sft/failed/step_00000001", "seed_1/head/reward"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "config.yaml").write_text("max_steps: 3\n")
        (tmp_path / run / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text("seeds: [0, 1]\n")
    found = {name for _, name in find_runs([tmp_path])}
    assert found == {"seed_0/base/sft", "seed_1/head/reward"}


# --- progress ---


def test_how_long_a_run_takes_by_hand(tmp_path: Path) -> None:
    lines = [{"step": 10, "elapsed_minutes": 1.0}, {"step": 20, "elapsed_minutes": 3.0}]
    assert seconds_per_step(lines) == 12.0
    assert seconds_per_step(lines[:1]) is None
    assert seconds_per_step([*lines, {"step": 20, "eval_loss": 1.0}]) == 12.0
    assert total_steps(run_of(tmp_path / "a", "max_steps: 40\nnum_train_epochs: 9\n", *lines)) == 40
    half = {"step": 20, "epoch": 0.5}
    assert total_steps(run_of(tmp_path / "b", "max_steps: 0\nnum_train_epochs: 3.0\n", half)) == 120
    assert total_steps(run_of(tmp_path / "c", "max_steps: 0\nnum_train_epochs: 3.0\n")) is None
    run = run_of(tmp_path / "d", "max_steps: 40\n", *lines)
    bar, shown = watch.progress(run, run.changed + 5)
    assert shown == "step 20 of 40, 12 s per step, 3 min so far, 4 min left, last line 5 s ago"
    assert bar == 15 * watch.DONE + 15 * watch.LEFT
    assert [duration(s) for s in (3, 89, 91, 5460, 11100)] == [
        *("3 s", "89 s", "2 min", "1 h 31 min", "3 h 05 min")
    ]


# --- curves ---


def test_sparklines_by_hand() -> None:
    assert sparkline([0, 1, 2, 3], [0.0, 4.0, 2.0, 7.0], 4) == "▁▅▃█"
    assert sparkline([0, 1, 2, 3], [0.0, 2.0, 4.0, 6.0], 2) == "▁█"  # means 1 and 5
    assert sparkline([0, 4], [1.0, 0.0], 4) == "███▁"
    assert sparkline([1], [1.0], 2) == " ▅"
    assert sparkline([2, 4], [3.0, 3.0], 4) == "  ▅▅"
    assert sparkline([], [], 3) == "   "


def test_metrics_are_shown_in_a_fixed_order_with_those_of_reward_functions() -> None:
    records = [{"step": 1, "kl": 1.0, "reward/b": 1.0, "tokens": 5.0}, {"step": 1, "loss": 1.0}]
    records += [{"step": 2, "reward/a": 1.0, "reward": 1.0, "elapsed_minutes": 1.0}]
    assert recorded(records, watch.SHOWN) == ["loss", "reward", "reward/a", "reward/b", "kl"]


@pytest.mark.parametrize(("width", "height"), [(200, 50), (79, 23), (30, 8)])
def test_a_picture_fits_the_window(tmp_path: Path, width: int, height: int) -> None:
    names = watch.SHOWN
    lines = [{"step": s, "elapsed_minutes": s / 9, **dict.fromkeys(names, s / 7)} for s in range(9)]
    lines.append({"step": 9, "loss": None, "reward/\x1b[31m\n": 1.0})
    run = run_of(tmp_path / ("long name " * 9), "max_steps: 40\n", *lines)
    row = {"step": 8, "prompt": "a post " * 50, "completion": "\x1b[2J\n" * 9, "tokens": ["a"]}
    row["\x1b[2J"] = "a column of a reward function"
    append(run.folder / "samples.jsonl", row, row | {"prompt": "other", "reward": 1.0})
    run.read()
    other = Run(tmp_path / "none", "none")
    text = picture([other, run], width, height, run.changed)
    assert max(map(len, text.split("\n"))) <= width
    assert len(text.split("\n")) <= height
    assert "\x1b" not in text
    if height > 20:
        assert "loss" in text
        assert "samples at step 8" in text
        assert "tokens" not in text.replace("tokens_per_second", "")
    assert set(text) & {*watch.BLOCKS}
    assert not set(text.translate(watch.PLAIN)) & {*watch.BLOCKS, watch.DONE, watch.LEFT}


def test_the_run_that_wrote_last_is_shown_whole(tmp_path: Path) -> None:
    old = run_of(tmp_path / "sft", "max_steps: 2\n", {"step": 2, "loss": 1.0})
    new = run_of(tmp_path / "dpo", "max_steps: 2\n", {"step": 1, "accuracy": 0.5})
    old.changed, new.changed = 1.0, 2.0
    text = picture([old, new, Run(tmp_path / "grpo", "grpo")], 100, 40, 3.0)
    first, second, third, *rest = text.split("\n")
    assert first.startswith("sft")
    assert "all steps made" in first
    assert second.split() == ["grpo", "not", "started"]
    assert third.startswith("dpo")
    assert "step 1 of 2" in third
    assert [line.split()[0] for line in rest if line] == ["accuracy"]


# --- the program ---


def program(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "common.record.watch", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def test_once_prints_one_picture_without_control_characters(tmp_path: Path) -> None:
    run_of(tmp_path / "sft", "max_steps: 2\n", {"step": 1, "loss": 1.0})
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = program(str(tmp_path / "sft"), str(tmp_path / "later"), "--once", **both)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert re.search("later +not started", out)
    assert "loss" in out
    assert "\x1b" not in out


def test_a_log_gets_no_picture_twice(tmp_path: Path, monkeypatch: Any) -> None:
    run_of(tmp_path / "sft", "max_steps: 1\n", {"step": 1, "loss": 1.0})
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    log = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        watch.watch([tmp_path / "sft"], 1.0, False, log)
    assert naps == [watch.LOG_SECONDS] * 3
    assert log.getvalue().count("all steps made") == 1


def test_watching_loads_no_torch() -> None:
    code = "import common.record.watch, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pyproject.toml"], "pyproject.toml is a file; name the output_dir of a run"),
        (["x", "--interval", "0"], "--interval is 0.0; it must be above 0"),
        (["x", "--onc"], "unrecognized arguments: --onc"),
    ],
)
def test_what_cannot_be_watched_is_refused(
    arguments: list[str], sentence: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        watch.main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_on_a_terminal_it_follows_a_run_until_ctrl_c(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "100", "LINES": "30"}
    both = {"stdout": terminal, "stderr": terminal, "env": environment}
    process = program(str(tmp_path / "sft"), "--interval", "0.05", **both)
    os.close(terminal)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        limit = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < limit, seen
            seen += os.read(screen, 65536).decode("utf-8", "replace")

    until("not started")
    run_of(tmp_path / "sft", "max_steps: 4\n", {"step": 1, "loss": 0.5})
    until("step 1 of 4")
    append(tmp_path / "sft" / "metrics.jsonl", {"step": 2, "loss": 0.25})
    until("step 2 of 4")
    process.send_signal(signal.SIGINT)
    until("\x1b[?1049l")  # the terminal is as it was, and shows the last picture
    with contextlib.suppress(OSError):  # nobody has the other end open any more
        while chunk := os.read(screen, 65536):
            seen += chunk.decode("utf-8", "replace")
    assert process.wait(timeout=60) == 0
    assert "0.25" in seen.partition("\x1b[?1049l")[2]
    assert "Traceback" not in seen
    os.close(screen)


def test_ctrl_c_while_it_starts_is_no_traceback(tmp_path: Path) -> None:
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "argparse.py").write_text(interrupt)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = program("x", env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_it_ends_with_its_reader(opened: Callable[[], tuple[int, int]], tmp_path: Path) -> None:
    """`| head`, or a terminal that was closed."""
    reading, writing = opened()
    process = program(str(tmp_path), "--interval", "0.05", stdout=writing, stderr=subprocess.PIPE)
    os.close(reading)
    os.close(writing)
    assert process.communicate(timeout=60) == (None, "")
    assert process.returncode == 0
