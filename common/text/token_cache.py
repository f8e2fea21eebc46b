"""Tokenised rows on disk: mapped into memory by every rank, and kept for the next run.

A file is named after everything its content depends on: the data set, the settings, the tokenizer,
the versions of the libraries and the code itself. What cannot be read is made again, what cannot be
written is not kept: no run fails for its cache.

The body of a file (`checked_file.py`) is the length of a header, the header as JSON, and flat
arrays. There is no pickle in it. (An Arrow table is as short, but its library takes 35 MB a rank.)
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as package_version
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import gist
from common.text import checked_file, hub
from common.text.example import Example
from common.text.rows import data_files, readable
from common.text.truncate import leading_ids

MIN_ROWS = 1000  # fewer are tokenised before a file of them is found and checked
# Whoever changes how rows become tokens gets new files, without a version number to think of.
PACKAGES = ("numpy", "pyarrow", "tokenizers", "transformers")


class Stored(Sequence[Example]):
    """The examples of a file, each decoded when it is looked at, and the report on them."""

    def __init__(self, body: memoryview) -> None:
        """Find the arrays in the body of a file."""
        start = 8 + int.from_bytes(body[:8], "little")
        header = json.loads(bytes(body[8:start]))
        self.report: dict[str, Any] = header["report"]
        arrays = []
        for dtype, length in header["arrays"]:
            arrays.append(np.frombuffer(body, dtype, length, start))
            start += arrays[-1].nbytes
        id_ends, self.text_ends, self.ids, self.texts = arrays
        num_lists = (len(id_ends) - 1) // len(self)  # of ids in a row: the prompt, the completions
        self.ends = np.lib.stride_tricks.sliding_window_view(id_ends, num_lists + 1)[::num_lists]

    @property
    def lengths(self) -> Any:
        """(rows, 1 + K) int64, tokens of prompt and completions, without decoding a row."""
        return np.diff(self.ends)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.text_ends) - 1

    def __getitem__(self, index: Any) -> Any:
        """An example, or a list of some."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start, end = self.text_ends[index : index + 2]
        row, prompt, *rest = json.loads(self.texts[start:end].tobytes())
        prompt_ids, *completions = (self.ids[a:b].tolist() for a, b in pairwise(self.ends[index]))
        return Example(row, prompt, prompt_ids, completions, *rest)


def identity(
    dataset_name: str,
    split: str,
    dataset_config: str = "",
    dataset_revision: str = "",
    **_: Any,
) -> str:
    """What identifies the content of a split: a digest of its files, or the hub's fingerprint."""
    if dataset_name == "synthetic":
        return dataset_name
    files = data_files(dataset_name, split)
    if not files:
        return str(hub.rows_of(dataset_name, split, dataset_config, dataset_revision)._fingerprint)
    digest = hashlib.sha256()
    for file in files:
        with readable(file), file.open("rb") as stream:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            for part in checked_file.pieces(stream):
                digest.update(part)
    return digest.hexdigest()


def file_for(
    folder: str, tokenizer: Any, settings: Mapping[str, Any], identity: Callable[[], str]
) -> Path | None:
    """Where the tokens of some rows are, or belong; None where they are not cached.

    Args:
        folder: Folder of the cache; empty: no cache.
        tokenizer: Cached are only those whose whole behaviour can be written down: fast ones, of
            transformers itself, without parts in Python.
        settings: What the tokens depend on beside, as JSON values, `stop_ids` among them.
        identity: Tells the content of the data set.
    """
    behaviour = _behaviour(tokenizer, settings["stop_ids"]) if folder else None
    if behaviour is None:
        return None
    description = {
        "code": checked_file.code_digest(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "python": platform.python_version(),  # its Unicode tables tell white space
        "settings": dict(settings),
        "tokenizer": behaviour,
        "data": identity(),
    }
    text = json.dumps(description, sort_keys=True)
    return Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()}.tokens"


def read(file: Path | None) -> Stored | None:
    """What `write` was given; None where there is nothing, or it is damaged."""
    body = file and checked_file.read(file)
    return Stored(body) if body else None


def write(file: Path, rows: Sequence[Example], report: Mapping[str, Any]) -> None:
    """Keep at least one example, all with as many completions, and the report, as JSON values."""
    try:
        texts = [
            json.dumps([r.row, r.prompt, r.columns, r.source, r.messages]).encode() for r in rows
        ]
    except TypeError as error:  # of a Parquet file's dates, for example
        print(f"warning: tokenised rows are not kept: {gist(error)}.", flush=True)
        return
    lists = [ids for row in rows for ids in (row.prompt_ids, *row.completions)]
    id_ends, text_ends = (np.cumsum([0, *map(len, parts)]) for parts in (lists, texts))
    arrays = [
        id_ends,
        text_ends,
        np.fromiter(chain.from_iterable(lists), np.int32, count=int(id_ends[-1])),
        np.frombuffer(b"".join(texts), np.uint8),
    ]
    header = {"report": report, "arrays": [[array.dtype.str, len(array)] for array in arrays]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the arrays are aligned
    body = [len(text).to_bytes(8, "little"), text, *(array.data for array in arrays)]
    checked_file.keep(file, body, "tokenised rows", "token_cache_dir")


def _behaviour(tokenizer: Any, stop_ids: Sequence[int]) -> list[Any] | None:
    """All that decides which tokens a row has, as JSON values; None if it cannot be known."""
    # A class that comes with a model, or a slow one, may do anything.
    if not type(tokenizer).__module__.startswith("transformers.") or not tokenizer.is_fast:
        return None
    template = json.dumps(tokenizer.chat_template)
    if "strftime_now" in template:  # writes another text tomorrow
        return None
    # First: a call without padding and truncation clears those that an earlier call has left.
    leading = leading_ids(tokenizer)
    try:
        backend = tokenizer.backend_tokenizer.to_str()
    except Exception:  # tokenizers raises no narrower one for a part that is written in Python
        return None
    return [
        type(tokenizer).__qualname__,
        tokenizer.split_special_tokens,
        leading,
        tokenizer.decode(leading),
        [tokenizer.decode([i]) for i in stop_ids],
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        template,
        backend,
    ]
