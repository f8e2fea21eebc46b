"""Files of a cache: written whole or not at all, and not taken for good when they are damaged.

A file holds the SHA-256 of its name and body, then the body.
"""

import functools
import hashlib
import mmap
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import gist

CHECKSUM_BYTES = 32
PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def code_digest() -> str:
    """SHA-256 of this package's source: whoever changes what is cached gets new files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def read(file: Path) -> memoryview | None:
    """The body, mapped into memory; None where there is no such file or it is damaged."""
    try:
        with file.open("rb") as stream:
            if stream.read(CHECKSUM_BYTES) != checksum(file, pieces(stream)):
                return None
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    return memoryview(content)[CHECKSUM_BYTES:]


def keep(file: Path, body: Sequence[Any], what: str, flag: str) -> None:
    """Write a file of a cache, and its folder; a disk that refuses is warned about.

    Args:
        file: The last of several writers names it.
        body: Buffers, which are written one behind the other.
        what: Is not kept then.
        flag: That names the cache's folder.
    """
    unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("xb") as stream:
                for part in (checksum(file, body), *body):
                    stream.write(part)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(file.parent, what, flag, error.strerror or gist(error))


@functools.cache
def _warn_once(folder: Path, what: str, flag: str, reason: str) -> None:
    """Say that a folder takes no files, once per process and not once per split."""
    print(
        f"warning: {what} are not kept, {folder} cannot be written ({reason}); give another "
        f"--{flag}, or '' to keep none.",
        flush=True,
    )


def pieces(stream: BinaryIO) -> Iterator[bytes]:
    """What is left of a file, without ever holding all of it."""
    return iter(functools.partial(stream.read, 1 << 20), b"")


def checksum(file: Path, body: Iterable[Any]) -> bytes:
    """Of the name too: a file that was given another one is not taken for it."""
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return hashlib.sha256(file.name.encode() + digest.digest()).digest()
