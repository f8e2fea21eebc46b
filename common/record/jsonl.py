"""JSON lines files: reading, cutting, and atomic writing."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file, [] if it does not exist.

    An unfinished last line, as a killed run leaves it, is dropped; any other raises a RuntimeError.
    """
    if not path.exists():
        return []
    # A torn last line may end inside a character; "replace" leaves it to the parser below. Not
    # splitlines: a text may hold a Unicode line separator, which JSON does not escape.
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise RuntimeError(f"{path}, line {number}: not JSON ({error}).") from error
    return records


def num_lines(path: Path) -> int:
    """Number of whole lines in a file, 0 without it."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def keep_lines(path: Path, number: int, last_step: int = -1) -> None:
    """Cut a file to its first `number` lines, and those behind them up to that step.

    A shorter file stays as it is.
    """
    if path.exists():
        with path.open("rb+") as file:
            for _ in range(number):
                file.readline()
            end = file.tell()
            for line in file:
                if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                    break
                end += len(line)
            file.truncate(end)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder, made if missing, that replaces `path` once written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Replace a text file: after a crash it has all of the lines, or its old content."""
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def json_line(record: Mapping[str, Any]) -> str:
    """One line of a `.jsonl` file."""
    # JSON has no NaN or infinity, so they are null. A loss or gradient that is not finite stops the
    # run, with the value in the error message.
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    line = json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"
    # Half of a surrogate pair, which is no character and has no UTF-8, becomes its escape in JSON
    return line.encode("utf-8", "backslashreplace").decode("utf-8")
