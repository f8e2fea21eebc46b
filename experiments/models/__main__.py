"""Which models are right, compared with plain transformers on texts without padding.

    python -m experiments.models PATH               # your folder: what is right, the flag to use
    python -m experiments.models                    # a tiny model of every causal type
    python -m experiments.models gemma4_text qwen3  # of these types, again

Each type is a process with a time limit. Results are added to a file as they come, and types that
are in it are left out the next time.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import transformers

from common import distributed
from common.record.terminal import run_command
from experiments.models import shrink, table
from experiments.runs.stages import ROOT

LIMIT = 150.0  # seconds of a type
LAUNCH = ("torch.distributed.run", "--standalone", "--nproc_per_node")


def measure(name: str, ranks: int) -> dict[str, Any]:
    """The row of a type or folder, from a process of its own."""
    is_folder = Path(name).is_dir()
    if not is_folder and (reason := shrink.not_a_decoder(name)):
        return {"type": name, "not a decoder": reason}
    start, end, limit = time.monotonic(), "", 3600.0 if is_folder else LIMIT * ranks
    launch = [*LAUNCH, str(ranks), "-m"] if ranks > 1 else []
    words = [sys.executable, "-m", *launch, "experiments.models.cells", name]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=limit)
        output = done.stdout
        if done.returncode:
            end = f"ended with status {done.returncode}: {done.stderr.decode()[-300:]}"
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"no end in {limit:.0f} seconds"
    lines = [line for line in output.decode().splitlines() if line.startswith("{")]
    row = {"type": name, "seconds": time.monotonic() - start, "end": " ".join(end.split())}
    return row | {"results": [json.loads(line) for line in lines]}


def main() -> None:
    """Measure, and print the table."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=text, allow_abbrev=False, prog="experiments.models"
    )
    parser.add_argument("names", nargs="*", metavar="PATH or TYPE")
    parser.add_argument("--output_dir", default="output/models")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--ranks", type=int, default=1, help="of each type, as by torchrun")
    args = parser.parse_args()
    distributed.quieten()
    file = Path(args.output_dir, f"{transformers.__version__}-{args.ranks}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    names = args.names or [name for name in shrink.types() if name not in table.read(file)]

    def one(name: str) -> None:
        row = measure(name, args.ranks)
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(table.line(row), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, names))
    rows = table.read(file)
    print(table.page({name: rows[name] for name in args.names or rows}))


if __name__ == "__main__":
    run_command(main)
