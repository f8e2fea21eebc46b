"""The model card of an exported folder: a README.md for the hub, from what a run has left."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.config import MODELS, SFTConfig
from common.errors import gist
from common.grpo.config import GRPOConfig
from common.pairs.config import DPOConfig
from common.pairs.reward_config import RewardConfig
from common.record.folder import ENVIRONMENT, read_config, read_metrics
from common.report.figures import dataset_title
from common.report.markdown import table

STAGES: dict[str, Any] = {c.__name__: c for c in (SFTConfig, RewardConfig, DPOConfig, GRPOConfig)}
SOFTWARE = ("git_commit", "model_commit", "dataset_commit", "python", "gpu")


def write(output_dir: Path, run: Path, stage: str, config: Mapping[str, Any], step: int) -> None:
    """Write the card into the folders `model` and `adapter`; a warning if that fails.

    Args:
        output_dir: where these are.
        run: folder with `metrics.jsonl` and `environment.json`, as far as it is there.
        stage: name of the config's class.
        config: values of all flags.
        step: after which the model was saved.
    """
    try:
        text = card(run, stage, config, step)
        for folder in (output_dir / name for name in MODELS):
            if folder.is_dir():
                (folder / "README.md").write_text(text, encoding="utf-8")
    except Exception as error:  # the model is what matters
        print(f"warning: no model card was written ({gist(error)}).", flush=True)


def card(run: Path, stage: str, config: Mapping[str, Any], step: int) -> str:
    """The text: flags that change what is computed, and of a path here the last two names."""
    cls, sources = STAGES[stage], (config["model_name_or_path"], config["dataset_name"])
    header = {"library_name": "transformers", "tags": [cls.stage.lower()]}
    named = zip(("base_model", "datasets"), sources, strict=True)
    known = read_config(run, ENVIRONMENT)
    header |= {key: [name] for key, name in named if name in known.get("hub_ids", [])}
    own = [f for f in dataclasses.fields(cls) if not f.metadata["may_change"]]
    lines = [line for line in read_metrics(run) if line["step"] <= step]
    contents: dict[tuple[str, str], dict[str, Any]] = {
        ("flag", "value"): {
            f.name: x for f in own if (x := config.get(f.name)) != f.metadata["default"]
        },
        ("metric", "last value"): {name: x for line in lines for name, x in line.items()},
        ("software", "version"): {k: known.get(k) for k in SOFTWARE} | known.get("packages", {}),
    }
    base, data = map(shown, sources)
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {config.get('hub_model_id') or run.name}",
        f"{cls.stage} of {base} on {data}, after {step} steps.",
        *(
            table(head, [[name, shown(x)] for name, x in rows.items() if x is not None])
            for head, rows in contents.items()
        ),
    ]
    return "\n\n".join(parts) + "\n"


def shown(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return f"{value:.6g}" if isinstance(value, float) else dataset_title(str(value))
