"""Which models are right, compared with plain transformers on texts without padding.

    python -m experiments.models PATH               # your folder: what is right, with which flags
    python -m experiments.models                    # a tiny model of every causal type
    python -m experiments.models gemma4_text qwen3  # of these types, again

Each type is a process with a time limit. Results are added to a file as they come, and types that
are in it are left out the next time.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import transformers
from torch.distributed.elastic.utils.distributed import get_free_port

from common import distributed
from common.errors import UserError
from common.record.terminal import run_command
from experiments.models import cells, shrink, table

LIMIT = 400.0  # seconds of a type: most take 10 on a free core
PROCESSES = multiprocessing.get_context("forkserver")  # which imports torch and transformers once
PROCESSES.set_forkserver_preload([cells.__name__])


def measure(name: str, ranks: int) -> table.Row:
    """The row of a type, from one or several separate processes."""
    if reason := shrink.not_a_decoder(name):
        return {"type": name, "not a decoder": reason}
    start, port = time.monotonic(), get_free_port()
    with tempfile.NamedTemporaryFile("r") as file:
        processes = [
            PROCESSES.Process(target=cells.run_type, args=(name, file.name, ranks, rank, port))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, start + LIMIT * ranks - time.monotonic()))
        is_late = any(process.is_alive() for process in processes)
        for process in processes:
            process.kill()
            process.join()
        results = [json.loads(line) for line in file]
    status = next((p.exitcode for p in processes if p.exitcode), 0)
    end = "no end in time" if is_late else f"ended with status {status}" * bool(status)
    seconds = time.monotonic() - start
    return {"type": name, "seconds": seconds, "end": end, "results": results}


def of_folder(path: str) -> None:
    """Print each result of a user's folder as it comes, and the table of what is right."""
    distributed.start()
    results = []
    for layout in cells.LENGTHS:
        for result in cells.run(path, layout):
            results.append(result)
            seen = table.outcome(result).replace("FOLDER", path)
            print(f"{layout}: {result['cell']}: {seen}", flush=True)
    print(table.page({path: {"results": results, "end": ""}}))


def of_types(names: Sequence[str], output_dir: str, jobs: int, ranks: int) -> None:
    """Measure types, those that are not in the file yet by default, and print the table."""
    file = Path(output_dir, f"{transformers.__version__}-{ranks}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)

    def one(name: str) -> None:
        row = measure(name, ranks)
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(name, row.get("end", "has no row"), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, names or [n for n in shrink.types() if n not in table.read(file)]))
    rows = table.read(file)
    print(table.page({name: rows[name] for name in names or rows}))


def main() -> None:
    """Run the command."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=text, allow_abbrev=False, prog="experiments.models"
    )
    parser.add_argument("names", nargs="*", metavar="PATH or TYPE")
    parser.add_argument("--output_dir", default="output/models")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a type, as by torchrun")
    args = parser.parse_args()
    distributed.quieten()
    if args.names and Path(args.names[0]).is_dir():
        of_folder(args.names[0])
    elif others := [name for name in args.names if name not in shrink.types()]:
        raise UserError(f"{others[0]!r} is no folder, and no causal type of transformers.")
    else:
        of_types(args.names, args.output_dir, args.jobs, args.ranks)


if __name__ == "__main__":
    run_command(main)
