"""The model card of an exported folder: a README.md for the hub, from what a run has left."""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.config import MODELS, SFTConfig
from common.errors import gist
from common.grpo.config import GRPOConfig
from common.pairs.config import DPOConfig
from common.pairs.reward_config import RewardConfig
from common.record.folder import read_environment, read_metrics
from common.report.markdown import table

STAGES: dict[str, Any] = {c.__name__: c for c in (SFTConfig, RewardConfig, DPOConfig, GRPOConfig)}
CARD = """---
{header}---

# {title}

{stage} of {base} on {data}{step}.

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{title}")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```

{tables}
"""


def write(
    output_dir: Path, run: Path, stage: str, config: Mapping[str, Any], step: int | None
) -> None:
    """Write the card into the folders `model` and `adapter`; a warning if that fails.

    Args:
        output_dir: where these are.
        run: folder with `metrics.jsonl` and `environment.json`, as far as it is there.
        stage: name of the config's class.
        config: values of all flags.
        step: after which the model was saved; None: the best one.
    """
    try:
        text = card(run, stage, config, step)
        for folder in (output_dir / name for name in MODELS):
            if folder.is_dir():
                (folder / "README.md").write_text(text, encoding="utf-8")
    except Exception as error:  # the model is what matters
        print(f"warning: no model card was written ({gist(error)}).", flush=True)


def card(run: Path, stage: str, config: Mapping[str, Any], step: int | None) -> str:
    """The text; of a path on this machine it has the last two names only."""
    cls, base, data = STAGES[stage], config["model_name_or_path"], config["dataset_name"]
    header: dict[str, Any] = {"library_name": "transformers"}
    header |= {"base_model": base} if is_hub_id(base) else {}
    header |= {"datasets": [data]} if is_hub_id(data) else {}
    defaults = {f.name: f.metadata["default"] for f in dataclasses.fields(cls)}
    flags = {key: value for key, value in config.items() if value != defaults.get(key)}
    lines = [line for line in read_metrics(run) if step is None or line["step"] <= step]
    known = read_environment(run)
    software = {key: known.get(key) for key in ("git_commit", "model_commit", "python", "gpu")}
    contents = {
        ("flag", "value"): flags,
        ("metric", "last value"): {name: x for line in lines for name, x in line.items()},
        ("software", "version"): software | known.get("packages", {}),
    }
    tables = [
        table(head, [[name, shown(x)] for name, x in rows.items() if x is not None])
        for head, rows in contents.items()
    ]
    kind = "SequenceClassification" if cls is RewardConfig else "CausalLM"
    return CARD.format(
        header=yaml.safe_dump(header | {"tags": [cls.stage.lower()]}, sort_keys=False),
        title=config.get("hub_model_id") or run.name,
        stage=cls.stage,
        base=shown(base),
        data=shown(data),
        step="" if step is None else f", after {step} steps",
        auto_class=f"AutoModelFor{kind}",
        tables="\n\n".join(tables),
    )


def is_hub_id(name: str) -> bool:
    """Whether it may be one; a name with one part is taken for a folder or the embedded task."""
    return re.fullmatch(r"[\w-]+/[\w.-]+", name) is not None and not os.path.exists(name)


def shown(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, list):
        return " ".join(map(shown, value))
    if isinstance(value, str) and os.path.isabs(value):
        return "/".join(Path(value).parts[-2:]).lstrip("/")
    return f"{value:.6g}" if isinstance(value, float) else str(value)
