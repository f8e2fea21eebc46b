"""One live run per `output_dir`: two would mix their records and remove each other's checkpoints.

The lock is the operating system's (`fcntl.lockf`), on a file in the folder: it goes with the
process however that ends, SIGKILL included, and reaches other hosts on NFS. The file stays; that it
is there means nothing.
"""

import fcntl
import os
import platform
from pathlib import Path
from typing import IO

from common.errors import UserError

NAME = ".lock"

_held: dict[Path, IO[str]] = {}  # closing any handle of the file would release the lock


def take(output_dir: Path) -> None:
    """Make the folder, hold it until `release` or the end of this process; idempotent. Rank 0 only.

    A file system without locks is not guarded.

    Raises:
        UserError: another process holds it, or nothing can be made there.
    """
    path = (output_dir / NAME).absolute()
    if path in _held:
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--output_dir {output_dir} cannot be written: {reason}.") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        advice = "wait for it, end it, or name another folder"
        what = f"--output_dir {output_dir} is being written by {holder}"
        raise UserError(f"{what}; {advice}.") from None
    except OSError:
        file.close()
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    _held[path] = file


def release(output_dir: Path) -> None:
    """Let another run write there; nothing happens if this process does not hold it."""
    file = _held.pop((output_dir / NAME).absolute(), None)
    if file is not None:
        file.close()
