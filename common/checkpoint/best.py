"""The best checkpoint of a run, by a metric that was logged at its step."""

from pathlib import Path

from common import distributed
from common.checkpoint import layout
from common.config.stages import TrainConfig
from common.errors import UserError
from common.record.glossary import is_defined
from common.record.run_folder import read_metrics


def refuse_impossible(config: TrainConfig) -> None:
    """Raise a UserError for a metric that no run of this stage logs, or not where it saves."""
    metric, every = config.metric_for_best_model, config.eval_steps
    if not metric:
        return
    is_held_out = metric.startswith("eval_")
    is_other = is_held_out and metric.partition("/")[0] not in config.eval_metrics
    if is_other or not is_defined(metric):
        raise UserError(
            f"--metric_for_best_model is {metric}, which no run of this stage logs; name "
            f"{', '.join(config.eval_metrics)}, or a metric of training steps (docs/metrics.md)."
        )
    reason = f"with --metric_for_best_model {metric}"
    if is_held_out and not every:
        raise config.refused("eval_steps", f"positive {reason}")
    if not config.save_steps or (is_held_out and config.save_steps % every):
        needed = f"a multiple of --eval_steps, {every}," if is_held_out else "positive"
        raise config.refused("save_steps", f"{needed} {reason}")


def ranking(output_dir: Path, metric: str) -> list[Path]:
    """The checkpoints at whose steps a metric was logged, the best first, of equal ones the older.

    The lowest loss is the best, and the highest of any other metric.
    """
    records = read_metrics(output_dir) if metric else []
    logged = {line["step"]: line[metric] for line in records if line.get(metric) is not None}
    folders = [path for path in layout.newest_first(output_dir) if layout.step_of(path) in logged]
    whole = [path for path in reversed(folders) if (path / layout.MANIFEST).exists()]
    sign = 1 if "loss" in metric else -1
    return sorted(whole, key=lambda path: sign * logged[layout.step_of(path)])


def find(output_dir: Path, metric: str) -> Path | None:
    """The best checkpoint that is not damaged, None without one or without a metric. Collective."""
    if not metric:
        return None
    for folder in distributed.from_rank0(ranking(output_dir, metric)):
        if reason := layout.damage(folder):
            distributed.print_rank0(f"warning: the checkpoint {folder} is skipped: {reason}.")
            continue
        distributed.print_rank0(f"the checkpoint with the best {metric} is {folder}")
        return Path(folder)
    distributed.print_rank0(
        f"warning: --metric_for_best_model {metric} was not logged at the step of any whole "
        "checkpoint; the last step is exported."
    )
    return None
