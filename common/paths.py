"""Paths that a user names, looked at before anything is read from them or written to them."""

import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError

LONGEST_SHOWN = 100  # characters of a path in a sentence
WRITTEN_FOLDERS = (
    *("model", "model.partial", "adapter", "adapter.partial", "checkpoints", "failed", "plots"),
    *("profile", "wandb"),
)
WRITTEN_FILES = (
    *("config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "results.json"),
    *("pairs.jsonl", "scores.jsonl", "completions.jsonl", "report.md", "report.html", ".lock"),
    *("plots/curves.png", "plots/summary.png", "plots/calibration.png"),
)


def refuse_unreachable(flag: str, path: str) -> None:
    """Raise a UserError for a link to nothing and for what cannot be looked at or read.

    That is a loop of links, a name that is too long, what there is no permission for. A path that
    is not there passes: it may be made, or be a hub id.
    """
    shown = path if len(path) <= LONGEST_SHOWN else f"{path[:LONGEST_SHOWN]}(...)"
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise UserError(
                f"--{flag} {shown} is a link to what is not there; name a file or folder."
            ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--{flag} {shown} cannot be looked at ({reason}); name a file or folder that can."
        ) from None
    refuse_forbidden(flag, path, os.R_OK)


def refuse_twice(flag: str, names: Sequence[str]) -> None:
    """Raise a UserError for one folder, or one hub id, under two names or twice under one."""
    found: dict[str, str] = {}
    for name in names:
        place = os.path.realpath(name)
        if place in found:
            raise UserError(
                f"--{flag} has {found[place]!r} and {name!r}, which are the same; each must be "
                "given once."
            )
        found[place] = name


def refuse_unwritable(flag: str, path: str) -> None:
    """Raise a UserError for a folder in which a run could not write. Makes nothing.

    A file where the trained model belongs, or a folder where its curves do, would be noticed after
    the training.
    """
    folder = Path(path).absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise UserError(f"--{flag} {path} needs {nearest} to be a folder, and it is none.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"--{flag} {path} cannot be written: {nearest} allows no new files; name another "
            "folder."
        )
    for name in ("model", "adapter"):
        place = Path(os.path.realpath(folder / name))
        is_fixed = os.path.ismount(place) or not os.access(place.parent, os.W_OK | os.X_OK)
        if (folder / name).is_symlink() and is_fixed:
            raise UserError(
                f"--{flag} {path} holds {name!r}, a link to {place}, which cannot be replaced; let "
                "it point to a folder inside one that can be written."
            )
    for name in WRITTEN_FOLDERS:
        is_awaited = name in ("model", "adapter") and not (folder / name).exists()  # by a link
        if os.path.lexists(folder / name) and not (folder / name).is_dir() and not is_awaited:
            raise UserError(
                f"--{flag} {path} holds a file {name!r} where a folder is to be written; "
                "remove it or name another folder."
            )
        refuse_forbidden(flag, folder / name, os.R_OK | os.W_OK)
    for name in WRITTEN_FILES:
        if (folder / name).is_dir():
            raise UserError(
                f"--{flag} {path} holds a folder {name!r} where a file is to be written; remove it "
                "or name another folder."
            )
        refuse_forbidden(flag, folder / name, os.R_OK | os.W_OK)


def refuse_forbidden(flag: str, path: str | Path, access: int) -> None:
    """Raise a UserError for a file or folder that is there and may not be read (and written)."""
    needed = access | os.X_OK if os.path.isdir(path) else access
    if os.path.exists(path) and not os.access(path, needed):
        what = "read and written" if access & os.W_OK else "read"
        raise UserError(
            f"--{flag}: {path} may not be {what} by this user; let it be, or name another."
        )
