"""The run that wrote a model: its folder, config, cost, reward and reference."""

import math
import re
from pathlib import Path
from typing import Any

from common.config.evaluate import EvaluateConfig
from common.errors import UserError
from common.objectives.implicit_reward import ImplicitReward
from common.record.run_folder import (
    ENVIRONMENT,
    MANIFEST,
    REWARD,
    read_config,
    read_metrics,
    read_training_config,
)
from common.text.sources import is_id


def folder_of_run(path: str) -> tuple[Path, float]:
    """The folder of the run that wrote a model, and the model's step, infinite for the last.

    Another tool may have written what is there: see `config_of_run`.
    """
    folder = Path(path).parent
    step = re.fullmatch(r"step_(\d+)", folder.name)
    if folder.parent.name != "checkpoints" or step is None:
        return folder, math.inf
    return folder.parent.parent, int(step[1])


def config_of_run(path: str) -> dict[str, Any]:
    """The config.yaml of the training run that wrote a model, empty for a model of no run."""
    return read_training_config(folder_of_run(path)[0]) if Path(path).is_dir() else {}


def run_cost(run_dir: Path, last_step: float = math.inf) -> dict[str, float]:
    """Minutes and peak memory of a run until a step, as its metrics.jsonl recorded them."""
    cost: dict[str, float] = {}
    for record in read_metrics(run_dir):
        if record["step"] > last_step:
            break
        cost |= {k: record[k] for k in ("elapsed_minutes", "peak_memory_gb") if k in record}
    return cost


def reward_of_run(path: str) -> ImplicitReward:
    """The reward by which the run that wrote a policy judges pairs; of no run log(pi / ref)."""
    folder, settings = folder_of_run(path)[0], config_of_run(path)
    about = read_config(folder, ENVIRONMENT) or read_config(folder, MANIFEST)  # a copied checkpoint
    if reward := settings and about.get(REWARD):
        return ImplicitReward(**reward)
    if "loss_type" in settings:
        raise UserError(f"{path} is of a DPO run that names no {REWARD}: train it again.")
    return ImplicitReward(settings.get("beta") or 1.0)


def policies_of(config: EvaluateConfig) -> list[str]:
    """The policies of an evaluation, the reference first; it may be one of them.

    Without a flag that names it, it is the first of several, and that of a single one's run.
    """
    if not config.policies:
        return []
    first, *others = config.policies
    reference = config.ref_model_name_or_path or (not others and reference_of_run(first)) or first
    return [reference, *config.policies]


def reference_of_run(path: str) -> str:
    """The reference, or else the start, of the run that wrote a policy; "" where none is there."""
    settings = config_of_run(path)
    paths = (settings.get(name) for name in ("ref_model_name_or_path", "model_name_or_path"))
    reference = next((p for p in paths if p and p != path), "")
    return reference if reference and (Path(reference).is_dir() or is_id(reference)) else ""
