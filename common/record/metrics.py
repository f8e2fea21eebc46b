"""What a run records and shows: exact means over ranks, files, bar, wandb, sample tables.

`metrics.jsonl` holds an object per logged step, `{"step": n, name: value, ...}`: training metrics
and evaluations are lines of their own. Every name is defined in `common/record/glossary.py`.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from common.config import TrainConfig, UserError, config_dict, save_run_files
from common.distributed import (
    all_reduce_sum,
    from_all_ranks,
    is_rank0,
    peak_memory_gb,
    world_size,
)
from common.exits.failures import note_step
from common.record import output_lock
from common.record.glossary import CONSOLE, METRICS, POSTFIX, SPANS, check_names
from common.record.jsonl import json_line, rewind_jsonl
from common.record.terminal import format_number, progress_bar, show_status, wrapped_table
from common.record.tracking import log_table, start_wandb, warn_about_wandb


class Accumulator:
    """Means over micro-batches and ranks, as sums and counts in float64.

    A mean of means weighs a short micro-batch like a long one; a sum over a count does not, so the
    result does not depend on how the rows were split.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Start empty; sums live on `device`, where the totals are computed."""
        self.device = device
        self._sums: dict[str, Tensor] = {}  # name -> (2,) float64: sum, count
        self._on_gpu = torch.device(device).type == "cuda"
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # not yet measured

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1) -> None:
        """Add a sum over `count` things. Local, and does not wait for the device.

        Args:
            name: a metric of `METRICS`.
            total: 0-d sum of the values; detached here.
            count: number of values summed; 0 where this rank has none.
        """
        check_names([name])
        if name not in self._sums:
            self._sums[name] = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums = self._sums[name]
        # In place: a Python number becomes a kernel argument, not a blocking copy to the device.
        sums[0] += total.detach() if isinstance(total, Tensor) else total
        sums[1] += count.detach() if isinstance(count, Tensor) else count

    def add_values(self, **values: Tensor | float) -> None:
        """Add values of the whole step, each the same on every rank, which count once together.

        So a run may be resumed between two lines with another number of ranks.
        """
        share = 1 / world_size()
        for name, value in values.items():
            total = value.double() if isinstance(value, Tensor) else value
            self.add(name, total * share, share)

    def total(self, name: str) -> Tensor:
        """This rank's sum so far, a float64 scalar on the device."""
        return self._sums[name][0]

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of this rank's sums and counts, (2,) by name, but for the times of phases."""
        return {name: sums.clone() for name, sums in self._sums.items() if name not in SPANS}

    def restore(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Go on from the sum and count of each name."""
        as_tensor = partial(torch.tensor, dtype=torch.float64, device=self.device)
        self._sums = {name: as_tensor(values) for name, values in sums.items()}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to a phase of the step, and label the block in a profile.

        Entered several times in a step, a phase is the sum; a block inside another counts in both.
        Does not wait for a GPU: there, the time is from when the device gets to the block until it
        has done the block's work, so phases one after another do not overlap.

        Args:
            name: one of `SPANS`.
        """
        assert name in SPANS, f"{name!r} is not a phase; those of SPANS are {SPANS}"
        # A label costs 6 microseconds even when no profiler runs, asking for one 0.05.
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        with torch.profiler.record_function(name) if profiled else nullcontext():
            if self._on_gpu:
                started = torch.cuda.Event(enable_timing=True)
                ended = torch.cuda.Event(enable_timing=True)
                started.record()
                yield
                ended.record()
                self._spans.append((name, started, ended))
            else:
                began = time.perf_counter()
                yield
                self.add(name, time.perf_counter() - began)

    def reduce(self, num_steps: int = 1) -> dict[str, float]:
        """Global means by sorted name; then empty. Collective: one all-reduce, one device wait.

        The ranks exchange their names first, on the host: one may be missing on some. Names that
        counted nothing on any rank are left out.

        Args:
            num_steps: optimiser steps since the last call. Phases of a step (`SPANS`) are divided
                by it, whatever the number of blocks that were timed, and averaged over all ranks,
                where a rank without such a block spent 0 seconds.
        """
        assert num_steps > 0, num_steps
        seconds: dict[str, float] = {}
        for name, started, ended in self._spans:
            ended.synchronize()  # elapsed_time, in milliseconds, raises before the event has passed
            seconds[name] = seconds.get(name, 0.0) + started.elapsed_time(ended) / 1000
        self._spans = []
        for name, value in seconds.items():
            self.add(name, value)
        # So that ranks agree on the layout: of a name that is made up only some may know.
        names = sorted({*METRICS, *from_all_ranks(list(self._sums))})
        nothing = torch.zeros(2, dtype=torch.float64, device=self.device)
        table = torch.stack([self._sums.get(name, nothing) for name in names])  # (names, 2)
        self._sums = {}
        reduced = all_reduce_sum(table).tolist()
        return {
            name: total / (num_steps * world_size() if name in SPANS else count)
            for name, (total, count) in zip(names, reduced, strict=True)
            if count != 0
        }


class RunLogger:
    """Shows and records a run. Call it on every rank: rank 0 writes and prints, others do nothing.

    Args:
        output_dir: gets `metrics.jsonl`, `samples.jsonl` and, with wandb, `wandb/`.
        total_steps: optimiser steps of the whole run.
        description: name of the stage, shown in the bar: "SFT".
        report_to: "none" or "wandb".
        run_name: name of the run in wandb.
        config: the resolved configuration, recorded in wandb.
        start_step: the step resumed from; what was logged after it is dropped.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        total_steps: int,
        description: str,
        report_to: str,
        run_name: str,
        config: Mapping[str, Any],
        start_step: int = 0,
    ) -> None:
        """Open the files, the bar and, if asked for, wandb."""
        assert report_to in ("none", "wandb"), report_to
        self.description = description
        self.total_steps = total_steps
        self._active = is_rank0()
        self._started = self._mark = time.monotonic()
        self._step_seconds = 0.0  # spent in steps since the last `log_training`
        self._step = self._logged_step = start_step
        note_step(start_step, total_steps)
        if not self._active:
            return
        self.output_dir = output_dir = Path(output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        earlier = rewind_jsonl(output_dir / "metrics.jsonl", start_step)
        self._started -= 60 * max((r.get("elapsed_minutes") or 0.0 for r in earlier), default=0.0)
        self._earlier_peak = max((r.get("peak_memory_gb") or 0.0 for r in earlier), default=0.0)
        rewind_jsonl(output_dir / "samples.jsonl", start_step)
        self._files = {
            name: (output_dir / name).open("a+", encoding="utf-8")
            for name in ("metrics.jsonl", "samples.jsonl")
        }
        self._wandb: Any = None
        if report_to == "wandb":
            self._wandb = start_wandb(output_dir, run_name, dict(config), start_step)
        self._bar = progress_bar(description, total_steps, start_step)

    @classmethod
    def start(
        cls, config: TrainConfig, description: str, total_steps: int, start_step: int
    ) -> "RunLogger":
        """The logger of a training run; rank 0 also writes `config.yaml` and `environment.json`.

        Raises:
            UserError: the run was resumed beyond its end.
        """
        if start_step > total_steps:
            raise UserError(
                f"the checkpoint is at step {start_step} and the run has {total_steps} steps; "
                "raise --max_steps or --num_train_epochs."
            )
        output_dir = Path(config.output_dir)
        if is_rank0():
            save_run_files(output_dir, config, world_size())
        return cls(
            output_dir,
            total_steps=total_steps,
            description=description,
            report_to=config.report_to,
            run_name=config.run_name or output_dir.name,
            config=config_dict(config),
            start_step=start_step,
        )

    def log_training(self, step: int, metrics: Accumulator) -> None:
        """Reduce and record what was added since the last call, with time and memory. Collective.

        `update` has told how many steps that were. `tokens_per_second` needs `tokens` among the
        metrics.
        """
        num_steps = self._step - self._logged_step
        values = metrics.reduce(max(num_steps, 1))
        values["peak_memory_gb"] = peak_memory_gb()
        if num_steps > 0:
            seconds = self._step_seconds / num_steps
            values["step_seconds"] = seconds
            if "tokens" in values:
                values["tokens_per_second"] = values["tokens"] / seconds
        self._logged_step, self._step_seconds = self._step, 0.0
        self.log(step, values)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step in every place, and print a short line of them."""
        check_names(metrics)
        if not self._active:
            return
        values = {name: float(value) for name, value in metrics.items()}
        values["elapsed_minutes"] = (time.monotonic() - self._started) / 60
        if "peak_memory_gb" in values:
            values["peak_memory_gb"] = max(values["peak_memory_gb"], self._earlier_peak)
        self._append(self._open("metrics.jsonl"), {"step": step, **values})
        self._to_wandb(lambda run: run.log({"step": step, **values}))
        labels = {"tokens_per_second": "completion_tokens_per_second"}
        shown = [
            f"{labels.get(name, name)} {format_number(values[name])}"
            for name in CONSOLE
            if name in values
        ]
        postfix = {name: format_number(values[name]) for name in POSTFIX if name in values}
        if postfix:  # an evaluation between two logs leaves the last training loss in the bar
            self._bar.set_postfix(postfix, refresh=False)
        self._write(f"{self.description} step {step}/{self.total_steps}: {', '.join(shown)}")
        self._mark = time.monotonic()

    def status(self, text: str) -> None:
        """Say in the bar what is happening ("sampling 34/56 tokens"); "" for nothing special.

        Cheap enough for every token: the bar is redrawn at its own pace.
        """
        if not self._active:
            return
        label = f"{self.description}: {text}" if text else self.description
        show_status(self._bar, label)

    def update(self, step: int) -> None:
        """End a step: move the bar, and count the time since the last call as the step's.

        `log` and `samples` restart that clock, so what is done between `update` and them, which is
        evaluation, is not part of any step.
        """
        now = time.monotonic()
        self._step_seconds += now - self._mark
        self._step, self._mark = step, now
        note_step(step, self.total_steps)
        if self._active:
            self._bar.update(step - self._bar.n)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print completions as a table, and add them to `samples.jsonl` and to wandb.

        What is measured of single tokens, which are lists, goes to `samples.jsonl` only.

        Args:
            step: optimiser steps made.
            rows: one mapping per completion with the same keys; the order of keys is the order of
                columns. Values are text, numbers, None, or lists.
        """
        if not self._active or not rows:
            return
        for row in rows:
            self._append(self._open("samples.jsonl"), {"step": step, **row})
        table = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]
        width = shutil.get_terminal_size((120, 24)).columns
        title = f"{self.description} samples at step {step}/{self.total_steps}"
        self._write(f"\n{title}\n{wrapped_table(table, width)}\n")
        columns = list(table[0])
        data = [[row.get(column) for column in columns] for row in table]
        self._to_wandb(lambda run: log_table(run, step, columns, data))
        self._mark = time.monotonic()

    def close(self) -> None:
        """End the bar, the files and the wandb run. The run is complete."""
        if not self._active:
            return
        self._active = False
        self._bar.close()
        for name in self._files:
            self._open(name).close()
        self._to_wandb(lambda run: run.finish())
        output_lock.release(self.output_dir)

    def _to_wandb(self, action: Callable[[Any], object]) -> None:
        """Do something with the wandb run, if there is one; one that fails is given up."""
        if self._wandb is None:
            return
        try:
            action(self._wandb)
        except Exception as error:
            self._wandb = None
            warn_about_wandb("stopped", error, self.output_dir)

    @staticmethod
    def _append(file: TextIO, record: Mapping[str, Any]) -> None:
        try:
            file.write(json_line(record))
            file.flush()  # a reader, or the next run after a crash, finds every logged step
        except OSError as error:
            error.filename = file.name  # for the sentence about a full disk
            raise

    def _open(self, name: str) -> TextIO:
        """A record to be added to; if somebody has removed its file, that is written anew."""
        file, path = self._files[name], self.output_dir / name
        if not path.exists():
            print(f"warning: {path} was removed in mid-run; it is written again.", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            file.seek(0)
            self._files[name] = path.open("a+", encoding="utf-8")
            self._files[name].write(file.read())
            file.close()
        return self._files[name]

    @staticmethod
    def _write(text: str) -> None:
        if sys.stderr.isatty():
            tqdm.write(text, file=sys.stdout)  # above the bar
        else:
            print(text, flush=True)  # tqdm.write would redraw the bar at every line of a log file
