"""Logging of metrics and samples to wandb, whose errors do not stop a run."""

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.config.stages import TrainConfig
from common.errors import gist


class Tracker:
    """A wandb run if `report_to` names it. After an error it is dropped, with a warning.

    Mode, entity and project are wandb's own settings (`WANDB_MODE=offline`, ...). A resumed run
    continues the wandb run whose id is in `output_dir/wandb/run_id`.
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
    """A wandb run, or the one that a resumed run began."""
    import wandb

    output_dir = Path(config.output_dir)
    id_file = output_dir / "wandb" / "run_id"
    resumed = start_step > 0 and id_file.exists()
    run_id = (id_file.read_text().strip() if resumed else "") or uuid.uuid4().hex[:8]
    id_file.parent.mkdir(parents=True, exist_ok=True)
    id_file.write_text(run_id)
    run = wandb.init(
        dir=str(output_dir),
        name=config.run_name or output_dir.name,
        config=asdict(config),
        id=run_id,
        resume="allow" if resumed else None,
        settings=wandb.Settings(init_timeout=60),
    )
    # A separate axis: wandb's counter refuses steps that a resumed run logs again.
    run.define_metric("*", step_metric="step")
    return run
