"""The model card of an exported folder: its README.md on the hub."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from common.config.stages import TrainConfig
from common.record.run_folder import short_path
from common.text.sources import is_id


def model_card(config: TrainConfig) -> str:
    """Stage, base, data, and the flags that change results and are not defaults.

    Of absolute paths it has the last two names.
    """
    from huggingface_hub import ModelCardData

    sources = (config.model_name_or_path, config.dataset_name)
    base, rows = ([source] if is_id(source) else None for source in sources)
    header = ModelCardData(
        library_name="transformers", tags=[config.stage.lower()], base_model=base, datasets=rows
    )
    flags = {
        f.name: shortened(value)
        for f in fields(config)
        if not f.metadata["may_change"]
        and (value := getattr(config, f.name)) != f.metadata["default"]
    }
    title = config.hub_model_id or Path(config.output_dir).name
    start, data = map(short_path, sources)
    return (
        f"---\n{header.to_yaml()}\n---\n\n# {title}\n\n{config.stage} of {start} on {data}.\n\n"
        f"```yaml\n{yaml.safe_dump(flags, sort_keys=False)}```\n"
    )


def shortened(value: Any) -> Any:
    """A flag's value; of absolute paths the last two names."""
    if isinstance(value, list):
        return [shortened(item) for item in value]
    return short_path(value) if isinstance(value, str) else value
