"""Tokenised rows on disk, so that a second run, or another rank, need not tokenise them again.

A file is named after everything its content depends on: the texts, the settings, the tokenizer, the
versions of the libraries and the code itself. What cannot be read is made again, what cannot be
written is not kept: no run fails for its cache, and no rank waits for another.

The body of a file (`checked_file.py`) is an `.npz` of flat arrays. There is no pickle in it.
"""

import hashlib
import io
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version as package_version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common import distributed
from common.text import checked_file
from common.text.chat import Conversation
from common.text.truncate import leading_ids

MIN_ROWS = 1000  # fewer are tokenised before a file of them is found and checked
# Whoever changes how rows become tokens gets new files, without a version number to think of.
PACKAGES = ("numpy", "tokenizers", "transformers")


class Entry(NamedTuple):
    """The first fields of an `Example`, in its order."""

    row: int
    prompt: str
    prompt_ids: list[int]
    completions: list[list[int]]


def file_for(
    folder: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    tokenizer: Any,
    settings: Mapping[str, Any],
) -> Path | None:
    """Where the tokens of these rows are, or belong; None where they are not cached.

    Args:
        folder: Folder of the cache; empty: no cache.
        rows: Rows of text. Below `MIN_ROWS` there is no gain.
        columns: The columns that are tokenised.
        tokenizer: Cached are only those whose whole behaviour can be written down: fast ones, of
            transformers itself, without parts in Python.
        settings: The arguments that the tokens depend on, as JSON values, `stop_id` among them.
    """
    if not folder or len(rows) < MIN_ROWS:
        return None
    behaviour = _behaviour(tokenizer, settings["stop_id"])
    if behaviour is None:
        return None
    versions = {name: package_version(name) for name in PACKAGES}
    versions["python"] = platform.python_version()  # its Unicode tables tell white space
    description = {
        "code": checked_file.code_digest(),
        "versions": versions,
        "settings": dict(settings),
        "columns": list(columns),
        "num_rows": len(rows),
        "tokenizer": behaviour,
    }
    digest = hashlib.sha256()
    # Each part is as long as an earlier one says: no two inputs give the same bytes.
    digest.update(hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest())
    # A rendered prompt is used whole, the same text in a plain row may be cut.
    digest.update(bytes(isinstance(row["prompt"], Conversation) for row in rows))
    for column in columns:
        texts = [row[column].encode() for row in rows]
        digest.update(np.array([len(text) for text in texts], dtype="<i8").tobytes())
        for text in texts:
            digest.update(text)
    return Path(folder) / f"{digest.hexdigest()}.tokens"


def read(
    file: Path | None, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[Entry], dict[str, Any]] | None:
    """The examples' own fields and the report as `write` was given them; None where there are none.

    Args:
        file: As `file_for` names it; a file that is missing or damaged is none.
        rows: The rows it was named after.
    """
    if file is None:
        return None
    body = checked_file.read(file)
    if body is None:
        return None
    with np.load(io.BytesIO(body), allow_pickle=False) as stored:
        arrays = dict(stored)
    kept = arrays["rows"].tolist()
    # One int object per id, not per token, as `encode` does: 4 times less memory.
    table = np.arange(arrays["ids"].max() + 1).astype(object)
    ids = [table[part].tolist() for part in _split(arrays["ids"], arrays["id_lengths"].ravel())]
    step = arrays["id_lengths"].shape[1]
    texts = (part.tobytes().decode() for part in _split(arrays["texts"], arrays["text_lengths"]))
    prompts = [
        # `str` makes a plain text of a `Conversation`, as tokenising does.
        str(rows[row]["prompt"]) if is_own else next(texts)
        for row, is_own in zip(kept, arrays["is_own_prompt"].tolist(), strict=True)
    ]
    entries = [
        Entry(row, prompt, ids[i * step], ids[i * step + 1 : (i + 1) * step])
        for i, (row, prompt) in enumerate(zip(kept, prompts, strict=True))
    ]
    report = json.loads(arrays["report"].tobytes())
    return entries, {k: tuple(v) if isinstance(v, list) else v for k, v in report.items()}


def write(
    file: Path | None,
    rows: Sequence[Mapping[str, Any]],
    examples: Sequence[Any],
    report: Mapping[str, Any],
) -> None:
    """Keep the tokens of at least one example; rank 0 only. A disk that refuses is warned about.

    Args:
        file: As `file_for` names it; None: nothing is kept.
        rows: The rows that the examples were made from.
        examples: With the fields of `Entry`, all with the same number of completions.
        report: Values that JSON can hold, sequences as tuples.
    """
    if file is None or not distributed.is_rank0():
        return
    id_lists = [ids for e in examples for ids in (e.prompt_ids, *e.completions)]
    id_lengths = np.array([len(ids) for ids in id_lists], dtype=np.int64)
    is_own = [example.prompt == rows[example.row]["prompt"] for example in examples]
    changed = [e.prompt.encode() for e, own in zip(examples, is_own, strict=True) if not own]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        rows=np.array([example.row for example in examples], dtype=np.int64),
        ids=np.fromiter(chain.from_iterable(id_lists), np.int32, count=int(id_lengths.sum())),
        id_lengths=id_lengths.reshape(len(examples), -1),  # (N, 1 + K): prompt, completions
        is_own_prompt=np.array(is_own, dtype=np.bool_),
        texts=np.frombuffer(b"".join(changed), dtype=np.uint8),
        text_lengths=np.array([len(text) for text in changed], dtype=np.int64),
        report=np.frombuffer(json.dumps(report).encode(), dtype=np.uint8),
    )
    checked_file.keep(file, buffer.getbuffer(), "tokenised rows", "token_cache_dir")


def _behaviour(tokenizer: Any, stop_id: int) -> list[Any] | None:
    """All that decides which tokens a text has, as JSON values; None if it cannot be known."""
    # A class that comes with a model, or a slow one, may do anything.
    if not type(tokenizer).__module__.startswith("transformers.") or not tokenizer.is_fast:
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
        backend,
    ]


def _split(flat: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Consecutive parts of the given lengths."""
    ends = np.cumsum(lengths).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
