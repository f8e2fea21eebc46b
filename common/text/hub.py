"""The Hugging Face hub: found out once whether it answers, and left alone if it does not."""

import functools

TIMEOUT = 5  # seconds for its first answer


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
