"""Data sets of the library `datasets`: on the hub, if it answers, or in a `save_to_disk` folder."""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError, gist, why_missing

TIMEOUT = 5  # seconds for its first answer
ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
OURS = ("assets", "data", "output")  # folders that recipes name, there or not
NO_ID = "and is no hub id (`name` or `owner/name`, where no folder `owner` is here)"


class NoSuchSplitError(UserError):
    """The data set exists, the split does not."""


def may_be_id(path: str) -> bool:
    """Whether a name that is no file or folder may be a hub id, not a misspelt path."""
    owner, slash, _ = path.partition("/")
    is_local = slash and (owner in OURS or os.path.isdir(owner))
    return ID.fullmatch(path) is not None and not is_local


def is_id(source: str) -> bool:
    """Whether an existing model or data set is on the hub, not a local one."""
    return may_be_id(source) and source != "synthetic" and not os.path.exists(source)


@functools.cache
def is_reachable() -> bool:
    """Whether the hub answers; if it does not, its libraries look into their cache only.

    Left to themselves they ask again for 23 seconds per file before they do (huggingface_hub 2.4).
    """
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
        except Exception:  # what its HTTP library raises; which one that is depends on its version
            constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def part_of(split: str) -> tuple[str, slice]:
    """Split `name[start:end]` into the name and the slice of its rows."""
    match = re.fullmatch(r"(.*)\[(\d*):(\d*)\]", split)
    if match is None:
        return split, slice(None)
    return match[1], slice(*(int(end) if end else None for end in match.groups()[1:]))


def is_saved(folder: str | Path) -> bool:
    """Whether `save_to_disk` has written a folder: of several splits, or of one, named `train`."""
    return any(Path(folder, name).is_file() for name in ("dataset_dict.json", "state.json"))


@functools.lru_cache(1)
def rows_of(name: str, split: str, config: str, revision: str) -> Any:
    """A split of a saved or a hub data set; a UserError at once if it cannot be read."""
    import datasets

    if is_saved(folder := os.path.expanduser(name)):
        saved = datasets.load_from_disk(folder)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        base, rows = part_of(split)
        if base not in splits:
            message = f"dataset_name {name!r} has no split {base!r}; it has {[*splits]}."
            raise NoSuchSplitError(message)
        data = splits[base]
        return data if rows == slice(None) else data.select(range(len(data))[rows])
    is_reachable()
    try:
        return datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # It lists the splits or the configurations that there are in its second sentence.
        listed = re.search(r"\[.*?\]", str(error))
        there = listed and listed[0] not in gist(error) and f"; it has {listed[0]}"
        there = there or why_missing(name)
        of = f"split {split!r}" + f", revision {revision!r}" * bool(revision)
        # `datasets` 5.2 raises a plain ValueError for an unknown split.
        kind = NoSuchSplitError if str(error).startswith("Unknown split") else UserError
        raise kind(
            f"dataset_name {name!r} ({of}) is no local file or folder and cannot be "
            f"loaded from the hub: {gist(error)}{there}."
        ) from None


def commit_read(name: str, split: str, source: Mapping[str, Any]) -> str:
    """The commit that a split was read at; empty for a local one."""
    if not is_id(name) or is_saved(os.path.expanduser(name)):
        return ""
    return commit_of(rows_of(name, split, source["dataset_config"], source["dataset_revision"]))


def commit_of(data: Any) -> str:
    """The commit of a hub data set, by the folder of its library's cache, which is named by it."""
    files = " ".join(str(file["filename"]) for file in data.cache_files)
    match = re.search(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])", files)
    return match[0] if match else ""
