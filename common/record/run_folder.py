"""A run's folder: the names of its files, and their writers and readers.

config.yaml         resolved values of all flags, usable as a recipe
environment.json    what ran them: versions, processor, GPUs, commit, processes, start, job
metrics.jsonl       a line for each logged step
samples.jsonl       a line for each completion in a table
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import datetime, timezone
from importlib import metadata
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
JOB_IDS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")  # a job keeps its own when it starts again
PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy", "wandb", "peft")


def save_run_files(
    output_dir: Path, config: Any, world_size: int, model_commit: str | None = None
) -> dict[Path, str]:
    """Write `config.yaml` and `environment.json`, with the commit of a hub's model. Rank 0 only.

    Returns their texts.
    """
    import torch
    import yaml

    from common.text import sources

    reward = getattr(config, "implicit_reward", None)
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # other kernels round otherwise
        "world_size": world_size,
        **accelerator(world_size),
        "compute_dtype": "bfloat16" if config.bf16 else "float32",
        "git_commit": git_commit(),
        "model_commit": model_commit,
        "dataset_commit": sources.dataset_commits.get(config.dataset_name) or None,
        "packages": versions(PACKAGES),
        "script": Path(sys.argv[0]).name,
        "stage": type(config).__name__,
        "inputs": inputs_of(config),
        **({REWARD: asdict(reward)} if reward else {}),
        **({"job": ids} if (ids := job_ids()) else {}),
        "started": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),  # this launch
    }
    texts = {
        output_dir / CONFIG: yaml.safe_dump(asdict(config), sort_keys=False),
        output_dir / ENVIRONMENT: json.dumps(environment, indent=2) + "\n",
    }
    for file, text in texts.items():
        write_atomically(file, [text])
    return texts


def job_ids() -> dict[str, str]:
    """The ids of the job that this process belongs to, by the variable that has it."""
    from common import distributed  # torch, which a driver of runs does without

    return {name: value for name in JOB_IDS if (value := distributed.environment(name))}


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


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of packages; None of one that is not installed."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in names}


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


def accelerator(world_size: int) -> dict[str, Any]:
    """The GPU of this process and how many the run has, one a process; 0 of them: on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None, "num_gpus": 0}
    file = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+(\.\d+)+", file.read_text() if file.is_file() else "")
    return {
        "gpu": torch.cuda.get_device_name(),
        "num_gpus": world_size,
        "driver": driver and driver[0],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def cpu_model() -> str:
    """The name of this machine's processor, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ; None outside a checkout."""
    root = Path(__file__).resolve().parent
    no_tags = ["--always", "--exclude=*", "--abbrev=40"]
    command = ["git", "-C", str(root), "describe", "--dirty", *no_tags]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def refuse_unwritable(path: str) -> None:
    """Raise a UserError for an output_dir in which a run could not write. Makes nothing."""
    folder = Path(path).absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise UserError(
            f"--output_dir {path} cannot be written: {nearest} is no folder that allows new files."
        )
