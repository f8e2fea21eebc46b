"""What is right for your model, compared with plain transformers on texts without padding.

    python -m experiments.models PATH    # in which layout, and what is refused

`make models` does the same with a tiny model of every causal type of transformers.
"""

import argparse
from pathlib import Path

from common import distributed
from common.errors import UserError
from common.record.terminal import run_command
from experiments.models import cells, table


def main() -> None:
    """Print each result of a folder as it comes, and the table of what is right."""
    parser = argparse.ArgumentParser(description=__doc__, prog="experiments.models")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", metavar="PATH", help="a model's folder")
    path = parser.parse_args().path
    if not Path(path).is_dir():
        raise UserError(f"{path!r} is no folder of a model.")
    distributed.quieten()
    distributed.start()
    results = []
    for layout in cells.LENGTHS:
        for result in cells.run(path, layout):
            results.append(result)
            seen = table.outcome(result).replace("FOLDER", path)
            print(f"{layout}: {result['cell']}: {seen}", flush=True)
    print(table.page({path: {"results": results, "end": ""}}))


if __name__ == "__main__":
    run_command(main)
