"""Which checkpoint of a run is the best, by a metric that was logged at its step."""

import difflib
from pathlib import Path

from common.checkpoint import files
from common.config import CommonConfig, TrainConfig
from common.errors import UserError
from common.record.folder import read_metrics
from common.record.glossary import METRICS, is_defined


def refuse_impossible(config: CommonConfig) -> None:
    """Raise a UserError for a metric that no run logs, or that is not known of any checkpoint."""
    if not isinstance(config, TrainConfig):
        return
    metric, every = config.metric_for_best_model, config.eval_steps
    if config.load_best_model_at_end and not metric:
        raise config.refused("load_best_model_at_end", "false without --metric_for_best_model")
    if metric and not config.save_steps:
        raise config.refused("save_steps", f"positive with --metric_for_best_model {metric}")
    if metric.startswith("eval_") and (not every or config.save_steps % every):
        wanted = f"a multiple of --eval_steps {every}, and that positive, with "
        raise config.refused("save_steps", f"{wanted}--metric_for_best_model {metric}")
    if metric and not is_defined(metric):
        close = difflib.get_close_matches(metric, METRICS, 3) or ["eval_loss", "reward"]
        raise UserError(
            f"--metric_for_best_model is {metric}, which no run logs; "
            f"name a metric, as {' or '.join(close)}."
        )


def logged(output_dir: Path, metric: str, step: int) -> float | None:
    """The metric's last value of a step, None if it was not logged there or none is asked for."""
    lines = read_metrics(output_dir) if metric else []
    values = [line[metric] for line in lines if line["step"] == step and metric in line]
    return values[-1] if values else None


def ranking(output_dir: Path, metric: str) -> list[Path]:
    """The checkpoints that were saved with this metric, the best first; of equal ones the older.

    Of a loss the lowest is the best, of anything else the highest. A folder that cannot be read is
    left out.
    """
    values = {}
    sign = 1 if "loss" in metric else -1
    for folder in reversed(files.newest_first(output_dir) if metric else []):
        try:
            manifest = files.read_manifest(folder)
        except ValueError:
            continue
        if manifest["config"]["metric_for_best_model"] != metric:
            continue
        value = manifest["metric"]
        if value is None:  # the last evaluation comes after the last checkpoint
            value = logged(output_dir, metric, files.step_of(folder))
        if value is not None:
            values[folder] = sign * value
    return sorted(values, key=values.__getitem__)
