"""Files of a cache: written whole or not at all, and not taken for good when they are damaged.

A file holds the SHA-256 of its name and body, then the body.
"""

import functools
import hashlib
import uuid
from pathlib import Path

from common.config import gist

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
    """The body, None where there is no such file or it is damaged."""
    try:
        content = memoryview(file.read_bytes())
    except OSError:
        return None
    stored, body = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    return body if stored == checksum(file, body) else None


def write(file: Path, body: memoryview) -> None:
    """Write a file, and its folder.

    Raises:
        OSError: the disk refuses.
    """
    # Another run may write the same file: each writes its own, and the last to finish names it.
    unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("xb") as stream:
            stream.write(checksum(file, body))
            stream.write(body)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def keep(file: Path, body: memoryview, what: str, flag: str) -> None:
    """Write a file of a cache; a disk that refuses is warned about.

    Args:
        file: as for `write`.
        body: as for `write`.
        what: is not kept then.
        flag: that names the cache's folder.
    """
    try:
        write(file, body)
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


def checksum(file: Path, body: memoryview) -> bytes:
    """Of the name too: a file that was given another one is not taken for it."""
    return hashlib.sha256(file.name.encode() + hashlib.sha256(body).digest()).digest()
