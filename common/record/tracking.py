"""Runs of wandb, if one is asked for: the names and tables of `metrics.jsonl` and of evaluation.

What a run logs last stands in wandb's summary under the same name. Nothing here stops a run.
"""

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import gist


class Tracker:
    """A wandb run; at the first call that fails it warns in a sentence, and then does nothing.

    Mode, entity and project are wandb's own settings (`WANDB_MODE=offline`, ...). A resumed run
    goes on in the same wandb run; its id is kept in `output_dir/wandb/run_id`.
    """

    def __init__(self, config: Any, start_step: int = 0) -> None:
        """Start it, or go on with it, if `report_to` asks for it; else every call does nothing."""
        self.output_dir = output_dir = Path(config.output_dir)
        self._run: Any = None
        if config.report_to != "wandb":
            return
        with self._outlived("did not start"):
            import wandb

            id_file = output_dir / "wandb" / "run_id"
            resumed = start_step > 0 and id_file.exists()
            run_id = (id_file.read_text().strip() if resumed else "") or uuid.uuid4().hex[:8]
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(run_id)
            self._run = wandb.init(
                dir=str(output_dir),
                name=getattr(config, "run_name", "") or output_dir.name,
                config=asdict(config),
                id=run_id,
                resume="allow" if resumed else None,
                settings=wandb.Settings(init_timeout=60),
            )
            # Our own axis: wandb's counter refuses a step that a resumed run logs a second time.
            self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values by name; those of a step have one called `step`."""
        if self._run is not None:
            with self._outlived():
                self._run.log(dict(values))

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], **values: Any
    ) -> None:
        """Log a table, of its own at every step."""
        if self._run is not None:
            with self._outlived():
                import wandb

                table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
                self._run.log({**values, name: table})

    def finish(self, summary: Mapping[str, float] | None = None) -> None:
        """End it, with numbers for its summary."""
        if self._run is not None:
            with self._outlived():
                self._run.summary.update(dict(summary or {}))
                self._run.finish()

    @contextmanager
    def _outlived(self, what: str = "stopped") -> Iterator[None]:
        """A block that may fail: a run of hours outlives its dashboard."""
        try:
            yield
        except Exception as error:
            self._run = None
            advice = f"metrics go to {self.output_dir} only"
            print(f"warning: wandb {what} ({gist(error)}); {advice}.", file=sys.stderr, flush=True)
