"""One live run per `output_dir`: two would mix their records and remove each other's checkpoints.

The lock is the operating system's, so that it goes with the process however that ends, SIGKILL
included.
"""

import errno
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from common.errors import UserError

NAME = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without them

_held: dict[Path, BaseFileLock] = {}  # by their folder


def take(output_dir: Path) -> None:
    """Make the folder, hold it until `release` or the end of this process; idempotent. Rank 0 only.

    A file system without locks is not guarded.

    Raises:
        UserError: another process holds it, or nothing can be made there.
    """
    folder = output_dir.absolute()
    if folder in _held:
        return
    lock = FileLock(folder / NAME, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            f"--output_dir {output_dir} is being written by another run; wait for it, end it, or "
            "name another folder."
        ) from None
    except OSError as error:
        if error.errno in NO_LOCKS:
            return
        reason = error.strerror or error
        raise UserError(f"--output_dir {output_dir} cannot be written: {reason}.") from None
    _held[folder] = lock


def release(output_dir: Path) -> None:
    """Let another run write there; nothing happens if this process does not hold it."""
    if lock := _held.pop(output_dir.absolute(), None):
        lock.release()
