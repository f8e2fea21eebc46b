"""A run's folder: the names of its files, and their writers and readers.

config.yaml         values of all flags, usable as a recipe
environment.json    what ran them: versions, processor, GPUs, commit, processes, start, job
metrics.jsonl       a line for each logged step
samples.jsonl       a line for each completion in a table
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.config.flags import values_of
from common.errors import UserError
from common.record.jsonl import read_jsonl, write_atomically

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
MANIFEST = "manifest.json"  # of a checkpoint, see `checkpoint/layout.py`
MARK = "finished.json"  # in a run's folder: what made it, if a driver did (`experiments/runs`)
DATA = {".jsonl", ".json", ".parquet", ".gz", ".safetensors"}
LONGEST_PATH = 1024  # characters
REWARD = "implicit_reward"  # in environment.json: that of DPO's loss, by which pairs are judged
# Flags of every training run in all versions; no other trainer writes the first two
MARKS_OF_TRAINING = {"max_dropped_fraction", "prompt_truncation", "learning_rate"}
REFERENCE_LOGPS = "ref_logps.pt"  # of DPO's pairs


def inputs_of(config: Any) -> dict[str, str]:
    """Digests of what the paths in a config name, but for what is written there."""
    paths = [f for f in fields(config) if f.metadata["is_path"] and not f.metadata["may_change"]]
    return input_digests(str(value) for f in paths for value in values_of(config, f))


def input_digests(texts: Iterable[str]) -> dict[str, str]:
    """A digest of each file and folder, and of what made each earlier run, that the texts name.

    `file.py:function` names a file; `output/sft` and `output/sft/model` are of the run in
    `output/sft`. Of a folder that no driver made names, sizes and times of rows and weights.
    """
    digests = {}
    for text in dict.fromkeys(texts):
        path = Path(text.split(".py:")[0] + ".py") if ".py:" in text else Path(text)
        path = path.expanduser()
        if not 0 < len(text) < LONGEST_PATH or not path.exists():
            continue
        marks = [folder / MARK for folder in (path, path.parent) if (folder / MARK).is_file()]
        if path.is_file() or marks:
            digests[text] = digest(path if path.is_file() else marks[0])
        else:
            files = sorted(f for f in path.iterdir() if f.suffix in DATA and f.is_file())
            about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            digests[text] = hashlib.sha256(repr(about).encode()).hexdigest()
    return digests


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    result = hashlib.sha256()
    with file.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            result.update(chunk)
    return result.hexdigest()


def mark_finished(output_dir: Path) -> None:
    """Write into `environment.json` that the run came to its end. Rank 0 only."""
    environment = read_config(output_dir, ENVIRONMENT) | {"finished": True}
    write_atomically(output_dir / ENVIRONMENT, [json.dumps(environment, indent=2) + "\n"])


def read_config(run_dir: Path, name: str = CONFIG) -> dict[str, Any]:
    """Read `config.yaml` or `environment.json`; empty without a mapping that can be read."""
    import yaml

    load = yaml.safe_load if name == CONFIG else json.loads
    try:
        values = load((run_dir / name).read_text(encoding="utf-8"))
    except Exception:  # of many types: other tools give files these names too
        values = None
    return values if isinstance(values, dict) else {}


def read_training_config(run_dir: Path) -> dict[str, Any]:
    """Read the `config.yaml` of a training run; empty for that of another tool or an evaluation."""
    values = read_config(run_dir)
    return values if values.keys() >= MARKS_OF_TRAINING else {}


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return read_jsonl(run_dir / METRICS)


def short_path(path: str) -> str:
    """The last two names of an absolute path; any other text as it is."""
    return "/".join(Path(path).parts[-2:]) if Path(path).is_absolute() else path


def refuse_unwritable(path: str) -> None:
    """Raise a UserError for an output_dir in which a run could not write. Makes nothing."""
    folder = Path(path).absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise UserError(
            f"--output_dir {path} cannot be written: {nearest} is no folder that allows new files."
        )
