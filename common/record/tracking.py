"""Logging of metrics and tables to wandb and tensorboard; their errors do not stop a run."""

import importlib.util
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import UserError, gist
from common.record.terminal import markdown_table

Rows = Sequence[Sequence[Any]]


def refuse_impossible(report_to: Sequence[str]) -> None:
    """Raise a UserError for tensorboard if it is not installed."""
    # wandb is a requirement, tensorboard is not
    if "tensorboard" in report_to and not importlib.util.find_spec("tensorboard"):
        advice = "`pip install tensorboard`, or leave it out"
        raise UserError(f"--report_to tensorboard needs a package that is not there; {advice}.")


class Wandb:
    """A wandb run. Mode, entity and project are wandb's own settings (`WANDB_MODE=offline`, ...).

    A resumed run continues the wandb run whose id is in `output_dir/wandb/run_id`. The last values
    are in wandb's summary under the same names.
    """

    def __init__(self, config: Any, start_step: int) -> None:
        """Start the wandb run, or resume it."""
        import wandb

        output_dir = Path(config.output_dir)
        id_file = output_dir / "wandb" / "run_id"
        resumed = start_step > 0 and id_file.exists()
        run_id = (id_file.read_text().strip() if resumed else "") or uuid.uuid4().hex[:8]
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(run_id)
        self._run: Any = wandb.init(
            dir=str(output_dir),
            name=getattr(config, "run_name", "") or output_dir.name,
            config=asdict(config),
            id=run_id,
            resume="allow" if resumed else None,
            settings=wandb.Settings(init_timeout=60),
        )
        # A separate axis: wandb's counter refuses steps that a resumed run logs again.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values by name."""
        self._run.log(dict(values))

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, **values: Any) -> None:
        """Log a table, together with values such as `step`."""
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({**values, name: table})

    def finish(self, summary: Mapping[str, float]) -> None:
        """End the wandb run, with numbers for its summary."""
        self._run.summary.update(dict(summary))
        self._run.finish()


class TensorBoard:
    """Event files in `output_dir/tensorboard`: scalars by step, tables as texts.

    A resumed run adds a file, and hides the steps in earlier files that it makes again.
    """

    def __init__(self, config: Any, start_step: int) -> None:
        """Open a file."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(Path(config.output_dir) / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=start_step and start_step + 1)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values by name, at `values["step"]`."""
        for name in values.keys() - {"step"}:
            self._writer.add_scalar(name, values[name], values["step"])
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int = 0) -> None:
        """Log a table in Markdown, which tensorboard renders."""
        texts = [[str(cell) for cell in row] for row in rows]
        self._writer.add_text(name, markdown_table(columns, texts), step)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Close the file, with final numbers at step 0."""
        self.log({**summary, "step": 0})
        self._writer.close()


TRACKERS: Mapping[str, Callable[[Any, int], Any]] = {"wandb": Wandb, "tensorboard": TensorBoard}


class Tracker:
    """The trackers of `report_to`; one that fails is dropped with a warning."""

    def __init__(self, config: Any, start_step: int = 0) -> None:
        """Start the trackers, or resume them from a step."""
        self.output_dir = Path(config.output_dir)
        self._trackers: dict[str, Any] = {}
        for name in TRACKERS.keys() & config.report_to:
            with self._dropped_on_error(name, "did not start"):
                self._trackers[name] = TRACKERS[name](config, start_step)

    def call(self, method: str, **arguments: Any) -> None:
        """Call a method of every tracker: `log`, `log_table` or `finish`."""
        for name, tracker in list(self._trackers.items()):
            with self._dropped_on_error(name):
                getattr(tracker, method)(**arguments)

    @contextmanager
    def _dropped_on_error(self, name: str, event: str = "stopped") -> Iterator[None]:
        """Drop a tracker, with a warning, if the block fails."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            advice = f"metrics go to {self.output_dir} only"
            text = f"warning: {name} {event} ({gist(error)}); {advice}."
            print(text, file=sys.stderr, flush=True)
