"""Logging of metrics and samples to wandb, whose errors do not stop a run."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.config.stages import TrainConfig
from common.distributed import environment
from common.errors import gist


class Tracker:
    """A wandb run if `report_to` names it. After an error it is dropped, with a warning.

    Mode, entity and project are wandb's own settings (`WANDB_MODE=offline`, ...), as is what else
    the environment sets. A resumed run continues the wandb run whose id is in
    `output_dir/wandb/run_id`, unless `WANDB_RUN_ID` names another.
    """

    def __init__(self, config: TrainConfig, start_step: int) -> None:
        """Start the wandb run, or resume it from a step."""
        self.output_dir = Path(config.output_dir)
        self._run: Any = None
        if config.report_to == "wandb":
            with self._dropped_on_error("did not start"):
                self._run = start_wandb(config, start_step)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values by name; the values have a `step`."""
        if self._run:
            with self._dropped_on_error():
                self._run.log(dict(values))

    def log_samples(self, columns: Sequence[str], rows: Sequence[list[Any]], step: int) -> None:
        """Log the table of samples."""
        if self._run:
            with self._dropped_on_error():
                import wandb

                table = wandb.Table(columns=list(columns), data=list(rows))
                self._run.log({"step": step, "samples": table})

    def finish(self) -> None:
        """End the wandb run."""
        if self._run:
            with self._dropped_on_error():
                self._run.finish()

    @contextmanager
    def _dropped_on_error(self, event: str = "stopped") -> Iterator[None]:
        """Drop the wandb run, with a warning, if the block fails."""
        try:
            yield
        except Exception as error:
            self._run = None
            advice = f"metrics go to {self.output_dir} only"
            text = f"warning: wandb {event} ({gist(error)}); {advice}."
            print(text, file=sys.stderr, flush=True)


def start_wandb(config: TrainConfig, start_step: int) -> Any:
    """A wandb run, or the one that a resumed run began.

    What the environment sets is left to wandb, the id too: jobs and sweeps' agents give it.
    """
    import wandb

    output_dir = Path(config.output_dir)
    id_file = output_dir / "wandb" / "run_id"
    before = id_file.read_text().strip() if start_step > 0 and id_file.exists() else None
    choices = {
        "dir": ("WANDB_DIR", str(output_dir)),
        "name": ("WANDB_NAME", output_dir.name),
        "id": ("WANDB_RUN_ID", before),
        "resume": ("WANDB_RESUME", "allow" if before else None),
        "settings": ("WANDB_INIT_TIMEOUT", wandb.Settings(init_timeout=60)),
    }
    values = {
        name: value for name, (variable, value) in choices.items() if not environment(variable)
    }
    if config.run_name:
        values["name"] = config.run_name
    run = wandb.init(config=asdict(config), **values)
    if before not in (None, run.id):
        print(
            f"wandb: the run goes on as {run.id}, by the environment; it was {before}", flush=True
        )
    id_file.parent.mkdir(parents=True, exist_ok=True)
    id_file.write_text(str(run.id))
    # A separate axis: wandb's counter refuses steps that a resumed run logs again.
    run.define_metric("*", step_metric="step")
    return run
