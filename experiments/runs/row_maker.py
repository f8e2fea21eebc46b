"""What the `make_rows.py` of recipes share: their command."""

import argparse
import inspect
import sys
from collections.abc import Callable

from common.errors import gist
from common.text import sources


def run(main: Callable[..., None], about: str) -> None:
    """Run `main`, whose parameters and defaults are the flags; end with a sentence if it fails."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    defaults = {name: p.default for name, p in inspect.signature(main).parameters.items()}
    for name, default in defaults.items():
        kind = "folder to write to" if name == "target" else "hub id, or folder of a local copy"
        note = f"default: {default}" if default else "required"
        parser.add_argument(f"--{name}", default=default, help=f"{kind} ({note})")
    arguments = vars(parser.parse_args())
    sources.is_reachable()  # if not, it is not asked again and again
    try:
        main(**arguments)
    except (OSError, ValueError) as error:  # no file, and nothing from the hub
        copies = " ".join(f"--{name} FOLDER" for name in defaults if name != "target")
        sys.exit(f"error: {gist(error)}; local copies are given by {copies}.")
