"""Tokenised rows on disk: mapped into memory by every rank, and kept for the next run.

A file is named after everything its content depends on: the data set, the settings, the tokenizer,
the versions of the libraries and the code itself. What cannot be read is made again, what cannot be
written is not kept: no run fails for its cache.

The body of a file (`checked_file.py`) is an Arrow table. There is no pickle in it.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

from common.errors import gist
from common.text import checked_file
from common.text.example import Example
from common.text.truncate import leading_ids

MIN_ROWS = 1000  # fewer are tokenised before a file of them is found and checked
# Whoever changes how rows become tokens gets new files, without a version number to think of.
PACKAGES = ("numpy", "pyarrow", "tokenizers", "transformers")


class Stored(Sequence[Example]):
    """The examples of a file, each decoded when it is looked at, and the report on them."""

    def __init__(self, body: memoryview) -> None:
        """Find the columns in the body of a file: texts as JSON, then each list of ids."""
        table = pyarrow.ipc.open_file(pyarrow.py_buffer(body)).read_all()
        self.report: dict[str, Any] = json.loads(table.schema.metadata[b"report"])
        self.texts, *self.ids = table.columns

    @property
    def lengths(self) -> Any:
        """(rows, 1 + K) int64, tokens of prompt and completions, without decoding a row."""
        return np.stack([pyarrow.compute.list_value_length(ids) for ids in self.ids], axis=1)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        """An example, or a list of some."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, prompt, *rest = json.loads(self.texts[index].as_py())
        prompt_ids, *completions = (ids[index].as_py() for ids in self.ids)
        return Example(row, prompt, prompt_ids, completions, *rest)


def file_for(
    folder: str, tokenizer: Any, settings: Mapping[str, Any], identity: Callable[[], str]
) -> Path | None:
    """Where the tokens of some rows are, or belong; None where they are not cached.

    Args:
        folder: Folder of the cache; empty: no cache.
        tokenizer: Cached are only those whose whole behaviour can be written down: fast ones, of
            transformers itself, without parts in Python.
        settings: What the tokens depend on beside, as JSON values, `stop_id` among them.
        identity: Tells the content of the data set.
    """
    behaviour = _behaviour(tokenizer, settings["stop_id"]) if folder else None
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
        texts = [json.dumps([r.row, r.prompt, r.columns, r.source, r.messages]) for r in rows]
    except TypeError as error:  # of a Parquet file's dates, for example
        print(f"warning: tokenised rows are not kept: {gist(error)}.", flush=True)
        return
    table = pyarrow.table({"texts": pyarrow.array(texts, pyarrow.large_string())})
    for number, lists in enumerate(
        zip(*([r.prompt_ids, *r.completions] for r in rows), strict=True)
    ):
        ids = pyarrow.array(lists, pyarrow.large_list(pyarrow.int32()))
        table = table.append_column(f"ids_{number}", ids)
    table = table.replace_schema_metadata({"report": json.dumps(report)})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    checked_file.keep(file, [sink.getvalue()], "tokenised rows", "token_cache_dir")


def _behaviour(tokenizer: Any, stop_id: int) -> list[Any] | None:
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
        tokenizer.decode([stop_id]),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        template,
        backend,
    ]
