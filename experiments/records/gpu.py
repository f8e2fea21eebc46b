"""A run that was timed on GPUs as one JSON file, to be added to assets/results/gpu.

    python -m experiments.records.gpu output/tldr-gpt2/sft
    python -m experiments.records.gpu output/tldr-gpt2/sft --into assets/results/gpu

The medians leave out the first steps (`--skip`), in which kernels are chosen, compiled or captured.
Steps are timed as in `metrics.jsonl`; run with `--logging_steps 1`.
"""

import argparse
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from common.errors import UserError
from common.record.run_folder import ENVIRONMENT, read_config, read_metrics
from common.record.terminal import run_command

FOLDER = Path("assets/results/gpu")
TIMES = ("step_seconds", "sample_seconds", "score_seconds", "reference_seconds", "update_seconds")


def measured(run: Path, skip: int) -> dict[str, Any]:
    """What ran and on what, its flags, and the medians of its steps, in seconds and GB.

    Raises:
        UserError: the run was not on a GPU, or has no step after those that are left out.
    """
    environment = read_config(run, ENVIRONMENT)
    if not environment.get("num_gpus"):
        raise UserError(f"{run} did not run on a GPU.")
    lines = [line for line in read_metrics(run) if "step_seconds" in line][skip:]
    if not lines:
        raise UserError(f"{run} logged no step after the first {skip}; see --skip.")
    medians = {name: median(line[name] for line in lines) for name in TIMES if name in lines[0]}
    kept = ("gpu", "world_size", "compute_dtype", "git_commit", "packages", "script", "started")
    return {
        **{name: environment[name] for name in kept},
        "flags": read_config(run),
        "num_steps": len(lines),
        "peak_memory_gb": max(line["peak_memory_gb"] for line in lines),
        **medians,
    }


def file_name(record: dict[str, Any]) -> str:
    """The card, the number of processes, the stage and the model."""
    model = Path(record["flags"]["model_name_or_path"])
    names = (model.parent.name, model.name) if model.name == "model" else (model.name,)
    stage = record["script"].removeprefix("train_").removesuffix(".py")
    words = [record["gpu"], f"x{record['world_size']}", stage, *names]
    return re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words)).lower() + ".json"


def main() -> None:
    """Print the record, or write it into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's output_dir")
    parser.add_argument("--skip", type=int, default=2, help="first steps that are left out")
    parser.add_argument("--into", type=Path, help=f"a folder, as {FOLDER}")
    args = parser.parse_args()
    record = measured(args.run, args.skip)
    text = json.dumps(record, indent=1) + "\n"
    if not args.into:
        print(text, end="")
        return
    args.into.mkdir(parents=True, exist_ok=True)
    (args.into / file_name(record)).write_text(text)
    print(args.into / file_name(record))


if __name__ == "__main__":
    run_command(main)
