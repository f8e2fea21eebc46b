"""Functions of a user's files, `path/to/file.py:function`; short names of functions and models."""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from common.errors import UserError, why_missing

USER_FOLDERS: list[str] = []  # that `module_of` has added to sys.path


def load_from_file(name: str, flag: str = "reward_funcs") -> Callable[..., Any]:
    """The function of `path/to/file.py:function`; runs the file. A UserError names the flag."""
    file, _, function_name = name.rpartition(":")
    path = Path(os.path.expanduser(file))  # Path's own raises for an unknown ~user
    if not file.endswith(".py") or not function_name:
        raise UserError(f"{flag} has {name!r}; name the function: path/to/file.py:function.")
    if not os.path.isfile(path):
        reason = why_missing(file)
        raise UserError(f"{flag} has {name!r}, and there is no file {file!r}{reason}.")
    function = getattr(module_of(path), function_name, None)
    if not callable(function):
        raise UserError(f"{flag} has {name!r}, and {file!r} has no function of that name.")
    return cast(Callable[..., Any], function)


def module_of(path: Path) -> ModuleType:
    """The module of a user's file, which runs once and may import the files of its folder.

    The folder is last in `sys.path`: it shadows nothing. The module has the file's name, by which
    spawned processes import it, or one with a hash if another module has that name. While the file
    runs, the modules of other such folders are hidden: two folders may have files of one name.
    """
    path = Path(os.path.realpath(path))
    folder, name = str(path.parent), path.stem.replace(".", "_")
    hashed = f"{name}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    for loaded in (sys.modules.get(name), sys.modules.get(hashed)):
        if loaded and os.path.realpath(getattr(loaded, "__file__", None) or "") == str(path):
            return loaded
    if folder not in map(os.path.realpath, sys.path):
        USER_FOLDERS.append(folder)
        sys.path.append(folder)
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or os.path.realpath(spec.origin or "") != str(path):
        spec = importlib.util.spec_from_file_location(hashed, path)
    assert spec is not None
    assert spec.loader is not None
    others = [other for other in USER_FOLDERS if other != folder]
    names = [each for each in sys.modules if folder_of(each) in others]
    hidden = {each: sys.modules.pop(each) for each in names}
    sys.path[:] = [each for each in sys.path if each not in others]
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    finally:
        sys.modules.update(hidden)
        sys.path[:] = [each for each in sys.path if each not in USER_FOLDERS] + USER_FOLDERS
    return module


def folder_of(module_name: str) -> str:
    """The entry of `sys.path` that a loaded module, or the package around it, comes from."""
    spec = getattr(sys.modules.get(module_name.partition(".")[0]), "__spec__", None)
    inside = [*(spec.submodule_search_locations or ()), spec.origin or ""][0] if spec else ""
    return os.path.dirname(inside)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Names in a table: as many of a path's last folders as make all of them differ."""
    paths = list(dict.fromkeys(paths))
    for depth in range(1, 1 + max((len(Path(path).parts) for path in paths), default=0)):
        names = {path: short_name(path, depth) for path in paths}
        if len(set(names.values())) == len(paths):
            return names
    return {path: path for path in paths}


def short_name(path: str, depth: int = 1) -> str:
    """A path's last `depth` folders; `run` for `run/model`, `run step 5` for a checkpoint's."""
    if ".py:" in path and depth == 1:
        return path.rpartition(":")[2]
    if ":" in path:  # of a file at a greater depth, or a built-in with its argument
        return path
    folders = Path(path).parts
    folders = folders[:-1] if len(folders) > 1 and folders[-1] == "model" else folders
    if len(folders) > 2 and folders[-2] == "checkpoints":
        step = folders[-1].removeprefix("step_").lstrip("0")
        folders = (*folders[:-3], f"{folders[-3]} step {step}")
    return "/".join(folders[-depth:])
