"""Runs of wandb, if one is asked for: the names and tables of `metrics.jsonl` and of evaluation.

What a run logs last stands in wandb's summary under the same name. Nothing here stops a run.
"""

import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def start_wandb(output_dir: Path, run_name: str, config: dict[str, Any], start_step: int) -> Any:
    """A wandb run, or None after one sentence of warning: a run of hours outlives its dashboard.

    Mode, entity and project are wandb's own settings (`WANDB_MODE=offline`, ...). A resumed run
    goes on in the same wandb run; its id is kept in `output_dir/wandb/run_id`.
    """
    id_file = output_dir / "wandb" / "run_id"
    resumed = start_step > 0 and id_file.exists()
    run_id = (id_file.read_text().strip() if resumed else "") or uuid.uuid4().hex[:8]
    try:
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(run_id)
        import wandb

        run = wandb.init(
            dir=str(output_dir),
            name=run_name,
            config=config,
            id=run_id,
            resume="allow" if resumed else None,
            settings=wandb.Settings(init_timeout=60),
        )
        # Our own axis: wandb's counter refuses a step that a resumed run logs for the second time.
        run.define_metric("*", step_metric="step")
    except Exception as error:
        warn_about_wandb("did not start", error, output_dir)
        return None
    return run


def log_table(run: Any, step: int, columns: list[str], data: list[list[Any]]) -> None:
    """Give a table of samples to a wandb run: a table of its own at every step."""
    import wandb

    run.log({"step": step, "samples": wandb.Table(columns=columns, data=data)})


def warn_about_wandb(what: str, error: Exception, output_dir: Path) -> None:
    """One sentence of warning: a run of hours outlives its dashboard."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    print(
        f"warning: wandb {what} ({reason}); metrics go to {output_dir} only.",
        file=sys.stderr,
        flush=True,
    )


def log_evaluation(
    output_dir: Path,
    run_name: str,
    config: dict[str, Any],
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    summary: Mapping[str, float],
) -> None:
    """An evaluation as a wandb run of its own: the table of systems, and numbers in its summary.

    Args:
        output_dir: Of the evaluation; gets `wandb/`.
        run_name: In wandb.
        config: The resolved configuration.
        headers: Of the table.
        rows: Of the table.
        summary: Numbers by name, to be compared between runs.
    """
    run = start_wandb(output_dir, run_name, config, 0)
    if run is None:
        return
    try:
        import wandb

        run.log({"systems": wandb.Table(columns=list(headers), data=[list(row) for row in rows])})
        run.summary.update(dict(summary))
        run.finish()
    except Exception as error:
        warn_about_wandb("stopped", error, output_dir)
