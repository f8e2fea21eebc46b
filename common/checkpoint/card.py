"""The model card of an exported folder: a README.md for the hub, from what a run has left."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.config import MODELS, SFTConfig
from common.grpo.config import GRPOConfig
from common.pairs.config import DPOConfig
from common.pairs.reward_config import RewardConfig
from common.record.folder import ENVIRONMENT, read_config, read_metrics
from common.report.figures import dataset_title

SOFTWARE = ("git_commit", "model_commit", "dataset_commit", "python", "gpu", "packages")
STAGES: dict[str, Any] = {c.__name__: c for c in (SFTConfig, RewardConfig, DPOConfig, GRPOConfig)}


def write(output_dir: Path, run: Path, stage: str, config: Mapping[str, Any], step: int) -> None:
    """Write the card into the folders `model` and `adapter` of `output_dir`.

    It has the flags that change results and are not defaults (of a path the last two names), the
    last metrics and the versions.

    Args:
        output_dir: where these are.
        run: folder with `metrics.jsonl` and `environment.json`, as far as it is there.
        stage: name of the config's class.
        config: values of all flags.
        step: after which the model was saved.
    """
    from huggingface_hub import ModelCardData

    if stage not in STAGES:  # a user's config class
        return
    cls, environment = STAGES[stage], read_config(run, ENVIRONMENT)
    sources = (config["model_name_or_path"], config["dataset_name"])
    base, rows = ([s] if s in environment.get("hub_ids", []) else None for s in sources)
    header = ModelCardData(
        library_name="transformers", tags=[cls.stage.lower()], base_model=base, datasets=rows
    )
    fields = [f for f in dataclasses.fields(cls) if not f.metadata["may_change"]]
    # A checkpoint of an earlier version lacks the flags that came later.
    known = [f for f in fields if f.name in config]
    changed = [f.name for f in known if config[f.name] != f.metadata["default"]]
    metrics = {name: x for m in read_metrics(run) if m["step"] <= step for name, x in m.items()}
    record = {
        "flags": {name: shortened(config[name]) for name in changed},
        "last metrics": metrics,
        "software": {name: environment[name] for name in SOFTWARE if environment.get(name)},
    }
    title, (start, data) = config.get("hub_model_id") or run.name, map(dataset_title, sources)
    text = (
        f"---\n{header.to_yaml()}\n---\n\n# {title}\n\n{cls.stage} of {start} on {data}, after "
        f"{step} steps.\n\n```yaml\n{yaml.safe_dump(record, sort_keys=False)}```\n"
    )
    for folder in (output_dir / name for name in MODELS):
        if folder.is_dir():
            (folder / "README.md").write_text(text, encoding="utf-8")


def shortened(value: Any) -> Any:
    """A flag's value; of paths the last two names."""
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return dataset_title(value) if isinstance(value, str) else value
