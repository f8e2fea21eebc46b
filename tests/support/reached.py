"""Notes which lines of some files run, in a process and in all that it starts or forks.

A started Python process imports `sitecustomize`, which `watch` writes into a folder on its path.
"""

import json
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "REACHED_LINES"  # path of the notes' description


class Reached:
    """A byte for each line, in a file that all processes map."""

    def __init__(self, starts: dict[str, int], size: int, file: str) -> None:
        """See `watch`; `starts` has the place of each file's line 0."""
        self.starts = starts
        with open(file, "r+b") as opened:
            self.hits = mmap.mmap(opened.fileno(), size)

    def trace(self, frame: FrameType, _event: str, _: object) -> Any:
        """See `sys.settrace`."""
        start = self.starts.get(frame.f_code.co_filename)
        if start is None:
            return None
        self.hits[start + frame.f_lineno] = 1
        return self.trace

    def take(self) -> set[int]:
        """Places since the last call."""
        found = {i for i, hit in enumerate(self.hits[:]) if hit}
        self.hits[:] = bytes(len(self.hits))
        return found


def watch(paths: Sequence[Path], folder: Path) -> tuple[Reached, list[tuple[str, int]]]:
    """Note lines of these files from now on; also the path and line of each place."""
    starts: dict[str, int] = {}
    names: list[tuple[str, int]] = []
    for path in paths:
        starts[str(path.resolve())] = len(names)
        num_lines = len(path.read_text().splitlines())
        names += [(str(path), line) for line in range(num_lines + 1)]
    (folder / "reached.bytes").write_bytes(bytes(len(names)))
    description = {"starts": starts, "size": len(names), "file": str(folder / "reached.bytes")}
    (folder / "reached.json").write_text(json.dumps(description))
    (folder / "sitecustomize.py").write_text(
        "from tests.support import reached\n\nreached.go_on()\n"
    )
    os.environ[VARIABLE] = str(folder / "reached.json")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return go_on(), names


def stop(folder: Path) -> None:
    """Leave processes alone that start later."""
    (folder / "sitecustomize.py").unlink(missing_ok=True)


def go_on() -> Reached:
    """Note lines in this process too, as the variable says."""
    reached = Reached(**json.loads(Path(os.environ[VARIABLE]).read_text()))
    threading.settrace(reached.trace)
    sys.settrace(reached.trace)
    return reached
