"""Logging of metrics and samples: files, progress bar, terminal, wandb.

`metrics.jsonl` holds an object per logged step, `{"step": n, name: value, ...}`: training metrics
and evaluations are separate lines. `common/record/glossary.py` has the names.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.config.stages import TrainConfig
from common.distributed import is_rank0, peak_memory_gb, progress_bar, world_size
from common.errors import UserError
from common.record import environment, run_folder, terminal
from common.record.glossary import CONSOLE, POSTFIX, recorded
from common.record.jsonl import json_line, write_atomically
from common.record.metrics import Accumulator
from common.record.tracking import Tracker
from common.shutdown.failures import note_step


class RunLogger:
    """Records and shows a run. Every rank calls it; only rank 0 writes and prints.

    Of a run that is resumed the files already end at `start_step` (`Checkpointer.load`).
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        start_step: int = 0,
        **facts: Any,  # see `save_run_files`
    ) -> None:
        """Open files, bar and tracker; a UserError for a run that is resumed beyond its end."""
        if start_step > total_steps:
            raise UserError(
                f"the checkpoint is at step {start_step} and the run has {total_steps} steps; "
                "raise --max_steps or --num_train_epochs."
            )
        self.stage, self.total_steps = config.stage, total_steps
        self._active = is_rank0()
        self._started = self._mark = time.monotonic()
        self._step_seconds = 0.0  # spent in steps since the last `log_training`
        self._step = self._logged_step = start_step
        note_step(start_step, total_steps)
        if not self._active:
            return
        self.output_dir = output_dir = Path(config.output_dir)
        self._run_files = environment.save_run_files(output_dir, config, world_size(), **facts)
        earlier = run_folder.read_metrics(output_dir)
        self._started -= 60 * max((r.get("elapsed_minutes") or 0.0 for r in earlier), default=0.0)
        self._earlier_peak = max((r.get("peak_memory_gb") or 0.0 for r in earlier), default=0.0)
        self._files = {
            name: (output_dir / name).open("a+", encoding="utf-8")
            for name in (run_folder.METRICS, run_folder.SAMPLES)
        }
        self._tracker = Tracker(config, start_step)
        self._bar = progress_bar(self.stage, total_steps, start_step)

    def log_training(self, step: int, metrics: Accumulator) -> None:
        """Reduce and record what was added since the last call, time and memory too. Collective."""
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
        """Record metrics of a step in the files, and print those of `CONSOLE`."""
        if not self._active:
            return
        values = {name: float(value) for name, value in metrics.items()}
        values["elapsed_minutes"] = (time.monotonic() - self._started) / 60
        if "peak_memory_gb" in values:
            values["peak_memory_gb"] = max(values["peak_memory_gb"], self._earlier_peak)
        self._append(run_folder.METRICS, {"step": step, **values})
        self._tracker.log({"step": step, **values})
        texts = {name: terminal.format_number(value) for name, value in values.items()}
        shown = [f"{name}\xa0{texts[name]}" for name in recorded([texts], CONSOLE)]
        postfix = {name: texts[name] for name in POSTFIX if name in texts}
        if postfix:  # an evaluation between two logs leaves the last training loss in the bar
            self._bar.set_postfix(postfix, refresh=False)
        line = f"{self.stage} step {step}/{self.total_steps}: {', '.join(shown)}"
        self._write(terminal.folded(line, terminal.line_width(), "    ").replace("\xa0", " "))
        self._mark = time.monotonic()

    def update(self, step: int) -> None:
        """End a step: move the bar, and add the time since the last call to the step's time.

        `log` and `samples` restart that clock: evaluation before them is not part of a step.
        """
        now = time.monotonic()
        self._step_seconds += now - self._mark
        self._step, self._mark = step, now
        note_step(step, self.total_steps)
        if self._active:
            self._bar.update(step - self._bar.n)

    def note(self, text: str) -> None:
        """Print a line about the run, of its stage."""
        if self._active:
            self._write(f"{self.stage}: {text}")

    def samples(
        self, step: int, rows: Sequence[dict[str, Any]], shown: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Add completions to `samples.jsonl`; log `shown`, else all of them, as a table.

        Rows have the same columns: text, numbers, None, or lists, which go to that file only.
        """
        if not self._active or not rows:
            return
        self._append(run_folder.SAMPLES, *({"step": step, **row} for row in rows))
        few = shown or rows
        table = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in few]
        title = f"{self.stage} samples at step {step}/{self.total_steps}"
        self._write(f"\n{title}\n{terminal.wrapped_table(table, terminal.line_width())}\n")
        self._tracker.log_samples([*table[0]], [[*row.values()] for row in table], step)
        self._mark = time.monotonic()

    def close(self) -> None:
        """Close the bar, the files and the tracker."""
        if not self._active:
            return
        self._active = False
        self._bar.close()
        for name in self._files:
            self._append(name)
            self._files[name].close()
        self._tracker.finish()

    def _append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Add lines to a file; it and the run's other files are written again if removed."""
        path = self.output_dir / name
        try:
            self._files[name].writelines(map(json_line, records))
            self._files[name].flush()  # for readers, and for a resumed run after a crash
            for removed in [each for each in (*self._run_files, path) if not each.exists()]:
                print(f"warning: {removed} was removed in mid-run; it is written again", flush=True)
                self._write_again(removed)
        except OSError as error:
            raise UserError(f"{path} could not be written ({error.strerror}).") from None

    def _write_again(self, path: Path) -> None:
        """Write a removed file: a record with its lines, which the open file still has."""
        if path in self._run_files:
            write_atomically(path, [self._run_files[path]])
            return
        with self._files[path.name] as file:
            file.seek(0)
            write_atomically(path, file)
        self._files[path.name] = path.open("a+", encoding="utf-8")

    @staticmethod
    def _write(text: str) -> None:
        if sys.stderr.isatty():
            tqdm.write(text, file=sys.stdout)  # above the bar
        else:
            print(text, flush=True)  # in a log file, tqdm.write would print the bar at every line
