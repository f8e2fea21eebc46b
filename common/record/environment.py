"""What a run, or a record, was made with: versions, processor, GPUs, commit; `environment.json`."""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from common import distributed
from common.record.jsonl import write_atomically
from common.record.run_folder import CONFIG, ENVIRONMENT, inputs_of
from common.text import sources

JOB_IDS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")  # a job keeps its own when it starts again
PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy", "wandb", "peft")


def save_run_files(
    output_dir: Path,
    config: Any,
    world_size: int,
    *,
    model_commit: str | None = None,  # of a hub's model
    **facts: Any,
) -> dict[Path, str]:
    """Write `config.yaml` and `environment.json`, which has the facts too. Rank 0 only.

    Returns their texts.
    """
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
        **facts,
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
    return {name: value for name in JOB_IDS if (value := distributed.environment(name))}


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of packages; None of one that is not installed."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in names}


def accelerator(world_size: int) -> dict[str, Any]:
    """The GPU of this process and how many the run has, one a process; 0 of them: on the CPU."""
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
