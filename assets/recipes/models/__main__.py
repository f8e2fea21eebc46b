"""Which models are right: a tiny model of every causal type of transformers.

    make models                             # MODELS="gemma4_text qwen3": of these types, again
    python -m assets.recipes.models gemma4_text qwen3

Each type is a process with a time limit. Results are added to a file as they come, and types that
are in it are left out the next time.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import transformers

from assets.recipes.models import shrink
from assets.recipes.models.measuring import measure
from common import distributed
from common.record.terminal import run_command
from experiments.models import table


def read(file: Path) -> dict[str, table.Row]:
    """The last row of each type in a file of JSON lines."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {row["type"]: row for row in map(json.loads, lines)}


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
        list(pool.map(one, names or [n for n in shrink.types() if n not in read(file)]))
    rows = read(file)
    print(table.page({name: rows[name] for name in names or rows}))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TYPE")
    parser.add_argument("--output_dir", default="output/models")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a type, as by torchrun")
    args = parser.parse_args()
    if others := set(args.names) - {*shrink.types()}:
        parser.error(f"no causal type of transformers: {', '.join(sorted(others))}")
    distributed.quieten()
    of_types(args.names, args.output_dir, args.jobs, args.ranks)


if __name__ == "__main__":
    run_command(main)
