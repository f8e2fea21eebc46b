"""The best checkpoint of a run, by a metric that was logged at its step."""

import difflib
from pathlib import Path

from common import distributed
from common.checkpoint import layout
from common.config.stages import CommonConfig, TrainConfig
from common.errors import UserError
from common.record.glossary import METRICS, is_defined
from common.record.run_folder import read_metrics


def refuse_impossible(config: CommonConfig) -> None:
    """Raise a UserError for a metric that cannot rank checkpoints."""
    from common.rewards.functions import short_names

    if not isinstance(config, TrainConfig):
        return
    metric, every = config.metric_for_best_model, config.eval_steps
    if config.load_best_model_at_end and not metric:
        raise config.refused("load_best_model_at_end", "false without --metric_for_best_model")
    if metric and not config.save_steps:
        raise config.refused("save_steps", f"positive with --metric_for_best_model {metric}")
    if metric.startswith("eval_") and metric.split("/")[0] not in config.eval_metrics:
        names = " or ".join(config.eval_metrics)
        raise config.refused("metric_for_best_model", f"{names}, or a metric of training steps")
    if metric.startswith("eval_") and (not every or config.save_steps % every):
        wanted = f"a multiple of --eval_steps {every}, and that positive, with "
        raise config.refused("save_steps", f"{wanted}--metric_for_best_model {metric}")
    head, slash, name = metric.partition("/")
    functions = short_names(getattr(config, "reward_funcs", [])).values()
    if slash and head in ("reward", "eval_reward") and name not in functions:
        raise config.refused(
            "metric_for_best_model", f"of a reward function: {', '.join(functions)}"
        )
    if metric and not is_defined(metric):
        close = difflib.get_close_matches(metric, METRICS, 3) or ["eval_loss", "reward"]
        raise UserError(
            f"--metric_for_best_model is {metric}, which no run logs; "
            f"name a metric, as {' or '.join(close)}."
        )


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
