"""Files of a checkpoint: names, manifest, checksums, and replacing folders.

    checkpoints/step_00000500/
        shard-00001-model-00001-of-00001.safetensors    a shard for each rank
        settings/                                       config, tokenizer: a model without weights
        manifest.json                                   step, config, and checksums of the files
        model/                                          once it was exported

A checkpoint is written under another name, flushed to the disk and renamed, so a folder with that
name was complete once. The checksums show later damage. Nothing in it is pickled.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common import distributed
from common.record.run_folder import MANIFEST, METRICS, SAMPLES, digest

NAME = re.compile(r"step_\d{8,}")
SETTINGS = "settings"  # files other than weights of an exported folder
RECORDS = (METRICS, SAMPLES)  # of the run, a line for each logged item
PARTIAL = ".partial"  # suffix of a folder that is being written


def folder_of(output_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` finished steps."""
    return output_dir / "checkpoints" / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The number in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step_"))


def newest_first(output_dir: Path) -> list[Path]:
    """The folders with a checkpoint's name, damaged ones too, the newest first."""
    folder = output_dir / "checkpoints"
    # `os.listdir` fails for an unreadable folder; `glob` would return nothing.
    names = filter(NAME.fullmatch, os.listdir(folder) if folder.is_dir() else [])
    return sorted(map(folder.joinpath, names), reverse=True)


# ---- the manifest --------------------------------------------------------------------------------


def is_checkpoint(name: str) -> bool:
    """Whether a path names a checkpoint; folders of other tools may have a manifest.json too."""
    return all(os.path.exists(os.path.join(name, content)) for content in (MANIFEST, SETTINGS))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest; a ValueError if it is missing or damaged."""
    contents: Any = None
    with suppress(OSError, ValueError):
        contents = json.loads((folder / MANIFEST).read_text())
    if isinstance(contents, dict):
        contents = contents.get("contents", contents)  # as before 2026-11-28
    if not isinstance(contents, dict) or "files" not in contents:
        raise ValueError(f"it has no {MANIFEST} that can be read")
    return contents


# ---- damage --------------------------------------------------------------------------------------


def describe(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, its entry in the manifest."""
    return {"bytes": file.stat().st_size, "sha256": digest(file)}


def damage(folder: Path) -> str:
    """The damage of a checkpoint, "" for a whole one. Collective: ranks share the reading."""
    try:
        files = _listed_files(folder)
        mine = sorted(files)[distributed.rank() :: distributed.world_size()]
        named = [(name, _wrong(folder / name, files[name])) for name in mine]
        faults = [f"{name} {fault}" for name, fault in named if fault]
    except ValueError as error:
        faults = [str(error)]
    return min(distributed.from_all_ranks(faults), default="")


def _listed_files(folder: Path) -> dict[str, Any]:
    """The manifest's entries by file; a ValueError for a manifest or a shard of another one."""
    contents = read_manifest(folder)
    if NAME.fullmatch(folder.name) and step_of(folder) != contents.get("step"):
        raise ValueError(f"its {MANIFEST} is of step {contents.get('step')}")
    files: dict[str, Any] = contents["files"]
    # torch reads every file with this suffix, listed or not
    if strays := {path.name for path in folder.glob("*.safetensors")} - files.keys():
        raise ValueError(f"{min(strays)} does not belong to it")
    return files


def _wrong(file: Path, expected: Mapping[str, Any]) -> str:
    """The fault of a file, "" for none."""
    try:
        return "" if describe(file) == expected else "does not have its checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


# ---- writing and removing ------------------------------------------------------------------------


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write into; it replaces `folder` when the block ends without an error."""
    folder = folder.resolve()  # a link stays, and its target is replaced
    partial = folder.with_name(folder.name + PARTIAL)
    discard(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        discard(partial)  # frees room on a full disk
        raise
    put_in_place(partial, folder)


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename a complete folder, after flushing its files: a power cut leaves the old or the new."""
    mode = partial.stat().st_mode & 0o666  # safetensors makes files that only the owner reads
    for path in partial.rglob("*"):
        if path.is_file():
            with suppress(PermissionError):  # of a file system without modes
                path.chmod(mode)
        flush(path)
    flush(partial)
    if os.path.lexists(folder):
        remove(folder)
    partial.rename(folder)
    flush(folder.parent)


def remove(folder: Path) -> None:
    """Remove a folder under another name: after a kill no half of it has the old name."""
    aside = folder.with_name(f"{folder.name}.old{PARTIAL}")
    discard(aside)
    folder.rename(aside)
    discard(aside)


def discard(path: Path) -> None:
    """Remove a folder, a file, or a link without its target, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_after(output_dir: Path, step: int) -> list[Path]:
    """Remove unfinished checkpoints and those after `step`; returns the latter."""
    for path in (output_dir / "checkpoints").glob(f"*{PARTIAL}"):
        discard(path)
    later = [path for path in newest_first(output_dir) if step_of(path) > step]
    for path in later:
        remove(path)
    return later


def remove_old(output_dir: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` (0: none)."""
    for path in newest_first(output_dir)[keep_last:] if keep_last else []:
        remove(path)
