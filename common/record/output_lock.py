"""A lock on `output_dir`: two runs would mix their records and remove each other's checkpoints.

The operating system holds it and releases it when the process ends, also by SIGKILL.
"""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from common.errors import UserError

NAME = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a file system without locks

_held: dict[Path, BaseFileLock] = {}  # by folder
_made: dict[Path, list[Path]] = {}  # by folder: it and its parents, innermost first, if made here


@contextlib.contextmanager
def given_up_on_error() -> Iterator[None]:
    """As a decorator of a run: `give_up` if it raises, also where another program goes on."""
    try:
        yield
    except BaseException:
        give_up()
        raise


def take(output_dir: Path) -> None:
    """Make and lock the folder until `release` or the end of this process. Idempotent; rank 0 only.

    On a file system without locks, nothing is locked. A UserError if another process holds the
    lock, or the folder cannot be written.
    """
    folder = output_dir.absolute()
    if folder in _held:
        return
    lock = FileLock(folder / NAME, fallback_to_soft=False)
    _made[folder] = [place for place in (folder, *folder.parents) if not place.exists()]
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
    """Release the lock, if this process holds it."""
    if lock := _held.pop(output_dir.absolute(), None):
        lock.release()


def give_up() -> None:
    """Release every lock, of a run that failed, and remove the folders made for it if empty."""
    for folder, made in _made.items():
        with contextlib.suppress(OSError):  # of what others have written there
            if made and [*folder.iterdir()] in ([], [folder / NAME]):
                (folder / NAME).unlink(missing_ok=True)  # while it is held: nobody else has it
                for place in made:
                    place.rmdir()
        release(folder)
    _made.clear()
