"""What a run records is the exact global mean, under a defined name, and survives a restart.

On a GPU, here replaced by a device with a separate clock, a phase is timed by the device and the
loop never waits. About `common.record`.
"""

import json
import math
import re
import shutil
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from mistakes import STAGES
from ranks import is_defined, launch, run_stages

import evaluate
from common import distributed
from common.config.parser import parse
from common.config.stages import SFTConfig
from common.errors import UserError
from common.record import logger as run_logger
from common.record import metrics, run_folder
from common.record.glossary import CONSOLE, METRICS, POSTFIX, PREFIXES
from common.record.jsonl import json_line, read_jsonl, write_atomically
from common.record.logger import RunLogger
from common.record.metrics import PHASES, Accumulator
from common.record.terminal import format_number, markdown_table, wrapped_table
from experiments.runs.stages import ROOT, config_class

pytestmark = pytest.mark.usefixtures("process_group")


def logger(output_dir: Path, start_step: int = 0, **fields: Any) -> RunLogger:
    config = SFTConfig(output_dir=str(output_dir), model_name_or_path="unused", **fields)
    return RunLogger(config, 100, start_step)


@pytest.mark.parametrize("is_last", [False, True])
def test_files_that_are_removed_in_mid_run_are_written_again(tmp_path, capsys, is_last):
    """Without config.yaml evaluate.py would judge the model by other settings."""
    run = logger(tmp_path / "run")
    run.log(1, {"loss": 1.0})
    run.samples(1, [{"completion": "yes"}])
    shutil.rmtree(tmp_path / "run")
    if not is_last:
        run.log(2, {"loss": 2.0})
    run.close()
    assert "metrics.jsonl was removed in mid-run; it is written again" in capsys.readouterr().out
    steps = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert steps == ([1] if is_last else [1, 2])
    assert read_jsonl(tmp_path / "run" / "samples.jsonl") == [{"step": 1, "completion": "yes"}]
    assert run_folder.read_config(tmp_path / "run")["output_dir"] == str(tmp_path / "run")
    assert "started" in run_folder.read_config(tmp_path / "run", run_folder.ENVIRONMENT)


def test_means_weigh_by_count_not_by_micro_batch() -> None:
    sums = Accumulator("cpu")
    sums.add("loss", torch.tensor(30.0), torch.tensor(10))  # ten tokens at 3
    sums.add("loss", 1.0, 1)  # one token at 1
    sums.add("accuracy", torch.tensor(2), 4)
    assert sums.reduce() == {"accuracy": 0.5, "loss": pytest.approx(31 / 11)}
    assert sums.reduce() == {}


def test_sums_are_float64_keep_no_graph_and_leave_out_what_was_not_counted() -> None:
    sums = Accumulator("cpu")
    sums.add("tokens", float(2**24), 1)
    sums.add("tokens", torch.tensor(1.0), 0)  # lost in float32
    sums.add("loss", (torch.ones(3, requires_grad=True) * 2).sum(), 3)
    sums.add("reward/gold", 0.0, 0)
    assert sums.reduce() == {"loss": 2.0, "tokens": 2**24 + 1}


def test_reduce_is_one_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(metrics, "all_reduce_sum", lambda table: calls.append(table) or table)
    sums = Accumulator("cpu")
    sums.add_values(loss=1.0, kl=2.0, grad_norm=torch.tensor(3.0))
    with sums.timed("sample_seconds"):
        pass
    assert list(sums.reduce()) == ["grad_norm", "kl", "loss", "sample_seconds"]
    assert len(calls) == 1
    assert calls[0].dtype == torch.float64


def reduce_on_rank() -> dict[str, float]:
    rank = distributed.rank()
    sums, clock = Accumulator("cpu"), SimpleNamespace(now=0.0)
    metrics.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[assignment]
    for _ in range([1, 3][rank]):
        with sums.timed("update_seconds"):
            clock.now += [6.0, 4.0][rank]
    if rank == 1:  # rank 0 has none, and does not know of it
        with sums.timed("score_seconds"):
            clock.now += 8.0
    metrics.time = time
    sums.add("loss", [6.0, 1.0][rank], [3, 1][rank])
    if rank == 1:
        sums.add("kl", 5.0, 2)
    sums.add("reward/length", [0.0, 4.0][rank], [0, 2][rank])
    if rank == 0:
        sums.add("logged/rare", 8.0, 2)
    return sums.reduce(num_steps=2)


def test_ranks_with_different_names_and_counts_agree_on_the_global_mean(tmp_path: Path) -> None:
    """Of a phase it is the seconds of a step, over ranks that enter it unequally often."""
    expected = {"kl": 2.5, "logged/rare": 4.0, "loss": 1.75, "reward/length": 2.0}
    expected |= {"score_seconds": 8 / 2 / 2, "update_seconds": (6 + 12) / 2 / 2}
    assert launch(reduce_on_rank, 2, tmp_path) == [expected, expected]


@pytest.mark.parametrize("name", ["los", "reward/", "rewards/gold", "logged/", "Loss", ""])
def test_a_name_outside_the_glossary_is_not_defined(name: str) -> None:
    assert not is_defined(name)


def test_names_in_the_code_are_defined() -> None:
    assert {*CONSOLE, *POSTFIX} <= {*METRICS, *PREFIXES}
    assert {*PHASES} <= {*METRICS}


GLOSSARY = ROOT / "docs" / "metrics.md"
IDENTITY = {"name", "kind", "path", "scored_by"}  # of a system: what it is, not what it measured
ENDS = {"low", "high", "a", "b", "judge", "first", "second"}  # of intervals and of comparisons


def table() -> dict[str, list[str]]:
    """Unit, formula and sentence of each name in the glossary."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    return {
        name.strip(): [cell.strip().replace("\\|", "|") for cell in others]
        for name, *others in cells
    }


def names_of(prefix: str) -> set[str]:
    """Names that the glossary has below `prefix`, like "win_rates.", in `results.json`."""
    names = [name.removeprefix("results: ").strip("`") for name in table() if "results: " in name]
    return {name.removeprefix(prefix) for name in names if name.rpartition(".")[0] + "." == prefix}


def test_every_metric_has_a_row_with_unit_formula_and_a_sentence() -> None:
    rows = table()
    logged = {name.strip("`"): cells for name, cells in rows.items() if "results: " not in name}
    assert list(logged) == list(METRICS)
    assert {len(cells) for cells in rows.values()} == {3}
    for name, (_, _, definition) in rows.items():
        assert definition[0].isupper() or definition[0] == "`" or definition[0].isdigit(), name
        assert definition.endswith("."), name


def test_the_page_of_symptoms_names_flags_and_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "symptoms.md").read_text()
    flags = {f.name for stage in STAGES for f in fields(config_class(stage))}
    assert set(re.findall(r"`--(\w+)", text)) <= flags
    looked_at = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")][1:]
    metrics = {name for cell in looked_at for name in re.findall(r"`([\w/<>]+)`", cell)}
    assert metrics <= set(METRICS)


def test_what_evaluation_writes_of_a_system_is_in_the_table(tmp_path, tiny_gpt2, tokenizer_folder):
    flags = {
        "dataset_name": "synthetic",
        "tokenizer_name_or_path": str(tokenizer_folder),
        "max_prompt_length": "128",
        "max_completion_length": "24",
    }
    training = {"model_name_or_path": str(tiny_gpt2), "max_steps": "1", "num_train_rows": "8"}
    training |= {"batch_size": "4", "num_eval_rows": "4", "output_dir": str(tmp_path / "sft")}
    run_stages([{"stage": "sft", "flags": flags | training}])
    logged = {name for line in read_jsonl(tmp_path / "sft/metrics.jsonl") for name in line}
    assert logged - {"step"} <= set(METRICS)
    flags |= {"output_dir": str(tmp_path / "eval"), "policies": str(tmp_path / "sft/model")}
    flags |= {"num_eval_rows": "8", "num_prompts": "4"}
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    arguments += ["--reward_funcs", "gold", "regex:the"]
    evaluate.main(parse(evaluate.EvaluateConfig, arguments))
    results = json.loads((tmp_path / "eval/results.json").read_text())
    (system,) = results["systems"]
    assert set(system) - IDENTITY == names_of(".")
    compared = {
        "win_rates": results["win_rates"][0],
        "comparison.differences": results["comparison"]["differences"][0],
    }
    for section, values in compared.items():
        names = {name for name in values if not name.startswith("num_")} - ENDS
        assert names == names_of(f"{section}."), section
    for name in ("report.html", "report.md", "plots/reward.png"):
        assert (tmp_path / "eval" / name).is_file()


def test_a_step_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = logger(tmp_path)
    run.update(10)
    run.log(10, {"loss": 1.25, "learning_rate": 3e-5, "reward/gold": 0.5})
    # Flushed at once: read before close.
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert 0 < record.pop("elapsed_minutes") < 1
    assert record == {"step": 10, "loss": 1.25, "learning_rate": 3e-5, "reward/gold": 0.5}
    run.close()
    line = "SFT step 10/100: loss 1.25, reward/gold 0.5, learning_rate 3.0e-05"
    assert line in capsys.readouterr().out


def test_a_line_of_a_step_fits_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    run = logger(tmp_path)
    values = {name: 1.25e-5 for name in CONSOLE if name not in PREFIXES}
    run.log(10, values | {f"reward/{'a-long-name-' * 8}": 0.5})
    run.close()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "".join(lines).replace("    ", " ")
    assert all(f"{name} 1.3e-05" in text for name in values)


def test_values_that_json_lacks_are_null(tmp_path: Path) -> None:
    run = logger(tmp_path)
    run.log(1, {"loss": math.nan, "grad_norm": math.inf, "kl": 0.0})
    run.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    del record["elapsed_minutes"]
    assert record == {"step": 1, "loss": None, "grad_norm": None, "kl": 0.0}


def test_a_broken_line_in_the_middle_is_an_error_for_a_reader(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RuntimeError, match="line 2"):
        read_jsonl(tmp_path / "metrics.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path, monkeypatch):
    run = logger(tmp_path)
    full = SimpleNamespace(writelines=lambda lines: Path("/dev/full").write_text("".join(lines)))
    monkeypatch.setitem(run._files, "metrics.jsonl", full)
    with pytest.raises(UserError, match=r"metrics.jsonl could not be written \(No space left on"):
        run.log(1, {"loss": 1.0})


def test_other_ranks_write_and_print_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_logger, "is_rank0", lambda: False)
    run = logger(tmp_path / "run", report_to="wandb")
    run.update(1)
    run.log(1, {"loss": 1.0})
    run.log_training(1, Accumulator("cpu"))
    run.samples(1, [{"completion": "text"}])
    run.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that metrics and logger read, moved by hand."""
    clock = SimpleNamespace(now=100.0)
    read = lambda: clock.now  # noqa: E731
    for module in (metrics, run_logger):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=read, perf_counter=read))
    return clock


def test_step_time_leaves_evaluation_out(tmp_path: Path, clock: SimpleNamespace) -> None:
    """The logger knows the number of steps: for phases a loop adds nothing to its calls."""
    run, sums = logger(tmp_path), Accumulator("cpu")

    def train(steps: range) -> None:
        for step in steps:
            clock.now += 1.0
            for _ in range(4):  # micro-batches
                spend(sums, clock, "update_seconds", 0.25)
            sums.add_values(tokens=100)
            run.update(step)
        run.log_training(steps[-1], sums)

    train(range(1, 4))
    clock.now += 50.0  # evaluation
    run.log(3, {"eval_loss": 1.0})
    clock.now += 7.0  # sampling a table
    run.samples(3, [{"completion": "text"}])
    train(range(4, 6))
    clock.now += 70.0
    run.log(5, {"eval_loss": 1.0})
    train(range(6, 8))
    run.close()
    first, _, second, _, third = read_jsonl(tmp_path / "metrics.jsonl")
    for line in (first, second, third):
        assert line["step_seconds"] == pytest.approx(2.0)
        assert line["update_seconds"] == pytest.approx(1.0)
        assert line["tokens_per_second"] == pytest.approx(50.0)
        assert line["peak_memory_gb"] > 0.01
    assert second["elapsed_minutes"] == pytest.approx((10 + 57) / 60)

    clock.now = 1000.0
    lines = read_jsonl(tmp_path / "metrics.jsonl")[:2]  # up to the checkpoint of step 3
    lines[0]["peak_memory_gb"] = 987.5
    write_atomically(tmp_path / "metrics.jsonl", map(json_line, lines))
    run = logger(tmp_path, start_step=3)  # goes on from 6 + 50 seconds
    clock.now += 30.0
    run.update(4)
    run.log_training(4, sums)
    run.close()
    resumed = read_jsonl(tmp_path / "metrics.jsonl")[-1]
    assert resumed["elapsed_minutes"] == pytest.approx((56 + 30) / 60)
    assert resumed["peak_memory_gb"] == 987.5
    assert resumed["step_seconds"] == pytest.approx(30.0)


def test_a_console_line_has_the_glossary_s_names_and_every_reward_function(tmp_path, capsys):
    run = logger(tmp_path)
    run.log(2, {"reward_shift": -1.5})
    run.log(3, {"tokens_per_second": 120.0, "reward/gold": 0.5, "reward": 2.0, "reward/a": 3.0})
    run.log(3, {"eval_reward/gold": 0.5, "eval_reward_low/gold": 0.25, "eval_reward": 2.0})
    run.close()
    assert [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "reward_shift -1.5",
        "reward 2, reward/a 3, reward/gold 0.5, tokens_per_second 120",
        "eval_reward 2, eval_reward/gold 0.5",
    ]


def test_off_a_terminal_the_bar_writes_a_few_whole_lines(tmp_path, capsys):
    run = logger(tmp_path)
    run._bar.delay = 0.0  # as after half a minute
    for step in range(1, 101):
        run.update(step)
        run.log(step, {"loss": 1.0})
    run.close()
    captured = capsys.readouterr()
    assert "\r" not in captured.err + captured.out
    assert len(captured.err.splitlines()) <= 4
    assert captured.err.splitlines()[-1].startswith("SFT: 100%")
    assert len(captured.out.splitlines()) == 100


def test_on_a_terminal_the_bar_says_what_happens(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = logger(tmp_path, start_step=40)
    run._bar.mininterval = 0.0
    run.log(41, {"loss": 0.5})
    run.update(41)
    run.close()
    drawn = capsys.readouterr().err
    assert re.search(r"41/100 .*loss=0\.5", drawn)


def test_samples_are_printed_and_their_history_is_kept(tmp_path, capsys):
    row = {
        "prompt": "A post.\n\nTL;DR:",
        "completion": " My cat | left\u2028\x1b[2J",
        "reward": 0.531,
    }
    run = logger(tmp_path)
    run.samples(0, [row, {"prompt": "Other", "completion": "", "stop_reason": "length"}])
    run.samples(50, [row])
    run.close()
    lines = read_jsonl(tmp_path / "samples.jsonl")
    assert [line["step"] for line in lines] == [0, 0, 50]
    assert lines[2] == {"step": 50, **row}
    printed = capsys.readouterr().out.splitlines()
    assert "SFT samples at step 0/100" in printed
    header = next(line for line in printed if line.startswith("prompt"))
    assert header.split() == ["prompt", "completion", "reward", "stop_reason"]
    assert any("0.531" in line and "My cat | left↵�[2J" in line for line in printed)


def test_wrapped_table_fits_and_keeps_the_end_of_prompts() -> None:
    row = {"prompt": "begin " + "word " * 200 + "TL;DR:", "completion": "x " * 300, "reward": 1.0}
    lines = wrapped_table([row, {**row, "reward": None}], 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 16
    assert any("TL;DR:" in line for line in lines)
    assert not any("begin" in line for line in lines)
    assert any("–" in line for line in lines)


def test_of_a_wrapped_table_long_texts_share_what_short_cells_leave() -> None:
    row = {"prompt": "a" * 99, "completion": "b" * 99, "reward": 12345.0, "stop_reason": "length"}
    lines = wrapped_table([row], 80).splitlines()
    assert lines[0].split() == list(row)
    first, second, *short = lines[2].split()
    assert short == ["12,345", "length"]
    assert abs(len(first) - len(second)) <= 1
    assert len(first) > 20


def test_no_table_obeys_what_its_cells_or_headers_hold() -> None:
    text = "a\x1b[2J\nb"
    for table in (wrapped_table([{text: text}], 80), markdown_table([text], [[text]])):
        assert "\x1b" not in table
        assert table.count("a\ufffd[2J\u21b5b") == 2


def test_markdown_table_is_aligned_and_escaped() -> None:
    assert markdown_table(["stage", "x"], [["a|b", "1.5"], ["long name", "-"]]) == (
        "| stage     |   x |\n| --------- | --: |\n| a\\|b      | 1.5 |\n| long name |   - |"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (0.0, "0"), (-1.23456, "-1.235"), (3e-5, "3.0e-05"), (0.5, "0.5")],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


def test_wandb_offline_records_a_run_and_resumes_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = logger(tmp_path, report_to="wandb", run_name="sft-7")
    run.log(10, {"loss": 1.5, "reward/gold": 0.5})
    run.samples(10, [{"completion": "a table row", "reward": 1.0}])
    run.close()
    first = (tmp_path / "wandb" / "run_id").read_text()
    (recorded,) = (tmp_path / "wandb").glob(f"offline-run-*-{first}/run-{first}.wandb")
    expected = (b"reward/gold", b"sft-7", b"learning_rate")
    deadline = time.monotonic() + 120  # offline, wandb 0.31 ends before the file is whole
    while missing := [text for text in expected if text not in recorded.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)
    (table,) = recorded.parent.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["a table row", 1.0]]

    logger(tmp_path, report_to="wandb", start_step=10).close()
    assert (tmp_path / "wandb" / "run_id").read_text() == first
    logger(tmp_path, report_to="wandb").close()
    assert (tmp_path / "wandb" / "run_id").read_text() != first


WANDB = {  # of the environment, and the argument of `wandb.init` that would overrule it
    "WANDB_RUN_ID": "id",
    "WANDB_RESUME": "resume",
    "WANDB_NAME": "name",
    "WANDB_DIR": "dir",
    "WANDB_INIT_TIMEOUT": "settings",
}


@pytest.mark.parametrize("start_step", [0, 10])
@pytest.mark.parametrize("variable", [*WANDB, "WANDB_PROJECT", "WANDB_SWEEP_ID"])
def test_what_the_environment_sets_of_wandb_is_not_overruled(
    variable: str, start_step: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """`output_dir/wandb/run_id` has the id that the run has, whoever gave it."""
    for name in WANDB:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "mine")
    wandb = mock.MagicMock()
    wandb.init.return_value.id = "of-wandb"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    id_file = tmp_path / "wandb" / "run_id"
    id_file.parent.mkdir()
    id_file.write_text("earlier")
    logger(tmp_path, start_step, report_to="wandb").close()
    passed = wandb.init.call_args.kwargs
    defaults = {"id": None, "resume": None, "name": tmp_path.name, "dir": str(tmp_path)}
    if start_step:
        defaults |= {"id": "earlier", "resume": "allow"}
    for name, value in defaults.items():
        assert passed.get(name) == (None if WANDB.get(variable) == name else value), name
    assert ("settings" in passed) == (variable != "WANDB_INIT_TIMEOUT")
    assert not {"project", "entity", "mode"} & {*passed}
    assert id_file.read_text() == "of-wandb"
    assert ("goes on as of-wandb" in capsys.readouterr().out) == bool(start_step)
    logger(tmp_path, report_to="wandb", run_name="by-flag").close()
    assert wandb.init.call_args.kwargs["name"] == "by-flag"


def wandb_without(broken: str, message: str) -> Any:
    """As the module, of which a function raises an error with the message."""
    wandb = mock.MagicMock()
    owner = wandb if broken in ("init", "Table") else wandb.init.return_value
    getattr(owner, broken).side_effect = OSError(message)
    return wandb


@pytest.mark.parametrize(
    ("module", "warning"),
    [
        (None, "did not start (import of wandb halted; None in sys.modules)"),  # not installed
        (wandb_without("init", "no route\nto host"), "did not start (no route to host)"),
        *((wandb_without(name, "gone"), "stopped (gone)") for name in ("log", "Table", "finish")),
    ],
)
def test_a_run_goes_on_without_wandb(module, warning, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = logger(tmp_path, report_to="wandb")
    for step in (1, 2):
        run.log(step, {"loss": 1.0})
        run.samples(step, [{"completion": "a"}])
    run.close()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warnings == [f"warning: wandb {warning}; metrics go to {tmp_path} only."]
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def spend(sums: Accumulator, clock: Any, name: str, seconds: float) -> None:
    with sums.timed(name):
        clock.now += seconds


class Event:
    """Of a GPU with a queue: it gets the device's time when the device comes to it."""

    milliseconds, waits = 0.0, 0  # of the device

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.time, self.passed = math.nan, False

    def record(self) -> None:
        self.time = Event.milliseconds

    def synchronize(self) -> None:
        assert not math.isnan(self.time)
        Event.waits += 1
        self.passed = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.passed, "torch raises here"
        return end.time - self.time


def test_on_a_gpu_the_device_is_timed_and_not_waited_for(monkeypatch, clock):
    sums = Accumulator("cpu")
    sums._on_gpu = True
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for milliseconds in (1000.0, 3000.0):
        with sums.timed("update_seconds"):
            clock.now += 0.001  # the host only queues
            Event.milliseconds += milliseconds
    assert Event.waits == 0
    assert sums.reduce(num_steps=2) == {"update_seconds": 2.0}
    assert Event.waits > 0
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
