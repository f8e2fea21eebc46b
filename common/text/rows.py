"""Rows from the hub, from local files or from the embedded task, checked against TRL's schemas."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from common.config import UserError, gist
from common.text import forms, hub, synthetic
from common.text.chat import is_messages
from common.text.forms import Row as Row

Kind = Literal["sft", "preference", "prompts"]

COMPLETION_COLUMNS: dict[str, tuple[str, ...]] = {
    "sft": ("completion",),
    "preference": ("chosen", "rejected"),
    "prompts": (),
}
"""Text columns of each kind beside `prompt`, in the order of the K completions."""

# What a reward function is given beside the columns of the rows.
ARGUMENTS = ("prompts", "completions", "completion_ids")
TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")
OWN_COLUMNS = ("prompt_ids", "has_stop")
RECIPES = Path("assets/recipes")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
NO_MESSAGES = ", of which 'messages' is no list of messages with the texts 'role' and 'content'"


def load_rows(
    dataset_name: str,
    split: str,
    *,
    kind: Kind,
    seed: int,
    num_rows: int | None = None,
    dataset_config: str | None = None,
) -> list[Row]:
    """Read one split and check every row against the schema of its kind.

    Args:
        dataset_name: `synthetic`; a file (.jsonl, .jsonl.gz, .json, .parquet), which is the split
            `train`, or the one it is named after (`validation.jsonl`); a folder with a file, or
            shards `split-00000-of-00002.parquet`, per split (also in its subfolder `data`); else a
            hub id.
        split: Name of the split; no other one takes its place.
        kind: `sft` (prompt, completion; or messages, the last of which is the completion),
            `preference` (prompt, chosen, rejected; without a `prompt` column it is the prefix that
            both texts share) or `prompts` (prompt). Other columns are kept as they are.
        seed: Seed of the embedded task; unused for other data.
        num_rows: Take the first rows only; None or 0 takes all.
        dataset_config: Name of the hub data set's configuration, if it has several.

    Returns:
        At least one row, of texts or of messages: then a completion is one, of the assistant. Any
        may be blank. A prompt that completions repeat is cut from them.

    Raises:
        UserError: Names the file or split, the row (counted from 1) and the column.
    """
    assert kind in COMPLETION_COLUMNS, kind
    if dataset_name == "synthetic":
        return synthetic.make_rows(kind, split, num_rows or None, seed)
    path = Path(os.path.expanduser(dataset_name))  # Path's own raises for an unknown ~user
    if path.is_dir():
        files = _split_files(path, split)
    elif path.is_file():
        files = [_single_file(path, split)]
    elif _looks_like_path(dataset_name):
        raise UserError(f"dataset_name {dataset_name!r} does not exist; give a file or a folder.")
    elif how := _how_it_is_made(dataset_name):
        raise UserError(f"dataset_name {dataset_name!r} does not exist: {how}.")
    else:
        files = []
    if files:
        source = os.fspath(files[0]) if len(files) == 1 else f"{path} split {split!r}"
        rows = [row for file in files for row in _read_file(file)]
    else:
        source = f"{dataset_name} split {split!r}"
        rows = _read_hub(dataset_name, split, dataset_config)
    if not rows:
        raise UserError(f"{source} has no rows; at least one is needed.")
    rows = rows[: num_rows or None]
    columns = COMPLETION_COLUMNS[kind]
    rows = [forms.with_completion(row, columns) for row in rows]
    rows = forms.without_repeated_prompts(rows, columns, source)
    rows = [forms.with_one_answer(row, columns) for row in rows]
    if kind == "preference":
        rows = [forms.with_explicit_prompt(row) for row in rows]
    _check_rows(rows, kind, source)
    return rows


def row_source(row: Row) -> str:
    """Where a row comes from, so that accuracies can be reported apart.

    `trl-lib/tldr-preference` mixes CNN/DailyMail articles into its validation split and keeps no
    column that says so; TRL's `examples/datasets/tldr_preference.py` gives them no SUBREDDIT and no
    POST. Rows of `openai/summarize_from_feedback` have a `batch` column instead.

    Args:
        row: A row as `load_rows` gave it: a prompt truncated from the start has lost its header.

    Returns:
        The row's own `source` column if it has one, else `tldr`, `cnn_dm` or `other`.
    """
    if isinstance(row.get("source"), str):
        return str(row["source"])
    batch = row.get("batch")
    if isinstance(batch, str) and "cnndm" in batch:
        return "cnn_dm"
    prompt = row["prompt"]
    if prompt.startswith("SUBREDDIT: r/"):
        return "tldr"
    if prompt.startswith("TITLE:") and "\n\nPOST:" not in prompt:
        return "cnn_dm"
    return "other"


def _looks_like_path(name: str) -> bool:
    """Whether a name that does not exist was meant as a path: `folder/name` is a valid hub id."""
    return (
        name.endswith(SUFFIXES)
        or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None
        or name.startswith((".", "~"))
    )


def _how_it_is_made(name: str) -> str:
    """Who makes a folder `data/...` that is not there, if a recipe of this checkout names it."""
    for recipe in sorted(RECIPES.glob("*/*.yaml")) if name.startswith("data/") else ():
        text = recipe.read_text(encoding="utf-8")
        is_own = re.search(rf"^dataset_name: {re.escape(name)}\b", text, re.MULTILINE)
        if is_own and re.search(r"^# Data: (?!as for)", text, re.MULTILINE):
            maker = recipe.with_name("make_rows.py")
            if maker.is_file():
                return f"`python {maker}` makes it; its first lines say from what"
            return f"the first lines of {recipe} say how it is made"
    return ""


def _single_file(path: Path, split: str) -> Path:
    """The file itself if it holds the split: `train`, or the split that it is named after."""
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"dataset_name {os.fspath(path)!r} must end in {', '.join(SUFFIXES)}.")
    if split not in ("train", path.name.split(".")[0]):
        raise UserError(
            f"dataset_name {os.fspath(path)!r} is a single file, which is the split 'train', not "
            f"{split!r}; put {split}.jsonl beside train.jsonl in a folder, name another split, or "
            "in training, have none: --dataset_test_split ''."
        )
    return path


def _split_files(folder: Path, split: str) -> list[Path]:
    """The file or the shards of one split, in order."""
    found = sorted(
        file
        for part in (folder, folder / "data")
        if part.is_dir()
        for file in part.iterdir()
        if (file.is_file() or file.is_symlink()) and file.name.endswith(SUFFIXES)
    )
    name = re.compile(re.escape(split) + r"(-\d+-of-(?P<shards>\d+)(-\w+)?)?(\.\w+)+")
    matches = {file: match for file in found if (match := name.fullmatch(file.name))}
    where = f"folder {os.fspath(folder)!r}"
    if not matches:
        there = ", ".join(os.fspath(file.relative_to(folder)) for file in found) or "no data files"
        raise UserError(
            f"{where} has no file for the split {split!r} ({split}.jsonl, .jsonl.gz, .json or "
            f".parquet), it has: {there}; name another split or folder."
        )
    shards = [match["shards"] for match in matches.values()]
    if len(matches) != int(shards[0] or 1) or len(set(shards)) > 1:
        files = ", ".join(file.name for file in matches)
        raise UserError(
            f"{where} must have one file for the split {split!r}, or all its shards once; "
            f"it has: {files}."
        )
    return list(matches)


def _read_file(path: Path) -> list[Row]:
    """Rows of one local file; a UserError names the file, and the line where one is at fault."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # type: ignore[import-untyped]

            return list(pyarrow.parquet.read_table(path).to_pylist())
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return _parse_json(_decode(data, os.fspath(path)), os.fspath(path))
    except UserError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError, OverflowError, zlib.error) as error:
        # pyarrow raises the first two, NotImplementedError, and for dates that Python cannot hold
        # OverflowError; lists in lists a RecursionError
        raise UserError(f"{os.fspath(path)} cannot be read: {gist(error)}.") from None


def _decode(data: bytes, source: str) -> str:
    """The text of a file, without a byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{source}, line {line}: byte 0x{data[error.start]:02x} is no text in UTF-8; save "
            "the file in that encoding."
        ) from None


def _json_fault(error: Exception) -> str:
    """What is wrong with a line of JSON, of which the decoder would say that it is the first."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON, at column {error.colno}: {error.msg}"
    return gist(error)


def _parse_json(text: str, source: str) -> list[Row]:
    """Rows of a JSON list of objects, or of one object per line."""
    if text.lstrip().startswith("["):
        documents = [("row", i, row) for i, row in enumerate(_DECODER.decode(text), start=1)]
    else:
        documents = []
        # Not splitlines(): a JSON string may hold U+2028, which that takes for a line break.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                documents.append(("line", number, _DECODER.decode(line)))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{source}, line {number}: {_json_fault(error)}.") from None
    for unit, number, row in documents:
        if not isinstance(row, dict):
            raise UserError(
                f"{source}, {unit} {number}: expected an object with named columns, "
                f"found {type(row).__name__}."
            )
    return [row for _, _, row in documents]


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which Python would keep the last of two equal keys in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice in an object")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_without_doubles)


def _read_hub(name: str, split: str, config: str | None) -> list[Row]:
    """Rows of a hub data set, or one sentence quickly if it cannot be had."""
    import datasets

    hub.is_reachable()
    try:
        return list(datasets.load_dataset(name, config or None, split=split).to_list())
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"dataset_name {name!r} (split {split!r}) is no local file or folder and cannot be "
            f"loaded from the hub: {gist(error)}."
        ) from None


def _check_rows(rows: Sequence[Row], kind: Kind, source: str) -> None:
    """Raise a UserError for the first row that does not fit the schema."""
    columns = ("prompt", *COMPLETION_COLUMNS[kind])
    for number, row in enumerate(rows, start=1):
        for column in columns:
            fault = _column_fault(row, column)
            if fault:
                raise UserError(f"{source}, row {number}: column {column!r} {fault}.")
            if is_messages(row[column]) != is_messages(row["prompt"]):
                raise UserError(
                    f"{source}, row {number}: {column!r} and 'prompt' must both be text or both "
                    "be messages."
                )
            roles = [m["role"] for m in row[column]] if is_messages(row[column]) else ["assistant"]
            if column != "prompt" and roles != ["assistant"]:
                names = " ".join(", ".join(roles).split())
                raise UserError(
                    f"{source}, row {number}: column {column!r} has messages of {names} "
                    "behind those that all completions share; it must be one, of the assistant."
                )
        clash = sorted({*ARGUMENTS, *TRAINER_ARGUMENTS, *OWN_COLUMNS} & row.keys())
        if kind == "prompts" and clash:
            raise UserError(
                f"{source}, row {number}: column {clash[0]!r} has the name of a reward function's "
                "argument; rename it."
            )


def _column_fault(row: Row, column: str) -> str:
    """What is wrong with a text column, empty if nothing is."""
    if column not in row:
        there = ", ".join(map(repr, row)) or "none"
        is_odd = "messages" in row and not is_messages(row["messages"])
        return f"is missing; the columns are {there}{NO_MESSAGES if is_odd else ''}"
    value = row[column]
    if value == []:
        return "is an empty list of messages; a conversation needs one before the answer"
    if not isinstance(value, str) and not is_messages(value):
        return (
            f"holds {type(value).__name__}, it must be text or a list of messages, each with the "
            "texts 'role' and 'content'"
        )
    texts = [value] if isinstance(value, str) else [message["content"] for message in value]
    return _character_fault("".join(texts))


def _character_fault(text: str) -> str:
    """What is wrong with the characters of a text, empty if nothing is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may escape half of a pair, which no file can hold
        half = text[error.start].encode("unicode_escape").decode()
        return f"holds {half}, half of a surrogate pair, which is no character; remove it"
    return ""
