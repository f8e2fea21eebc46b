"""The Hugging Face hub: its ids, and whether it answers."""

import functools
import os
import re

TIMEOUT = 5  # seconds for its first answer
ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
OURS = ("assets", "data", "output")  # folders that recipes name, there or not
NO_ID = "and is no hub id (`name` or `owner/name`, where no folder `owner` is here)"


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
