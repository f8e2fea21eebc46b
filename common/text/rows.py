"""Rows from the hub, from local files or from the embedded task, checked against TRL's schemas."""

import contextlib
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import distributed
from common.config import AUTO, CommonConfig
from common.errors import UserError
from common.text import files, forms, hub
from common.text.chat import content, is_messages
from common.text.data_report import progress
from common.text.forms import Row

COMPLETION_COLUMNS: dict[str, tuple[str, ...]] = {
    "sft": ("completion",),
    "preference": ("chosen", "rejected"),
    "prompts": (),
}
"""By the kind of rows: text columns beside `prompt`, in the order of the K completions."""

# What a reward function is given beside the columns of the rows.
ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "prompt_ids", "has_stop"),
    *("trainer_state", "log_extra", "log_metric"),
)
TEST_SPLITS = ("validation", "test")  # of which AUTO takes the first that is there
LIST = "list of messages, each with the texts 'role' and 'content'"


def load_rows(
    dataset_name: str,
    split: str,
    *,
    kind: str,
    num_rows: int = 0,
    dataset_config: str = "",
    dataset_revision: str = "",
    column_map: Mapping[str, str] = MappingProxyType({}),
    may_lack: bool = False,
    tell: Callable[[str], None] = distributed.print_rank0,
) -> list[Row]:
    """Read one split and check every row against the schema of its kind.

    Args:
        dataset_name: `synthetic`; a file (.jsonl, .jsonl.gz, .json, .parquet), which is the split
            `train`, or the one it is named after (`validation.jsonl`); a folder with a file, or
            shards `split-00000-of-00002.parquet`, per split (also in its subfolder `data`); one
            that `save_to_disk` has written; else a hub id.
        split: Name of the split, no other one takes its place; of some of its rows, counted from 0,
            as in `datasets`: `train[160:320]`.
        kind: `sft` (prompt, completion; or messages, of which every answer is trained),
            `preference` (prompt, chosen, rejected; without a `prompt` column it is the prefix that
            both texts share) or `prompts` (prompt). Other columns are kept as they are.
        num_rows: Take the first rows only; 0 takes all.
        dataset_config: Name of the hub data set's configuration, if it has several.
        dataset_revision: Branch, tag or commit of the hub data set; empty: its main branch.
        column_map: Names of columns by those that they get.
        may_lack: Columns of the map need not be there.
        tell: Takes what is to be known of the rows.

    Returns:
        At least one row, of texts or of messages: then a completion is one, of the assistant. Any
        may be blank. A prompt that completions repeat is cut from them.

    Raises:
        UserError: Names the file or split, the row (counted from 1) and the column.
    """
    assert kind in COMPLETION_COLUMNS, kind
    if dataset_name == "synthetic":
        from common.text import synthetic

        name, part = hub.part_of(split)
        limit = part.stop or (num_rows and (part.start or 0) + num_rows)
        return synthetic.make_rows(kind, name, limit)[part][: num_rows or None]
    source, found = _read(dataset_name, split, dataset_config, dataset_revision, tell)
    rows = list(progress(found, "reading"))
    if not rows:
        raise UserError(f"{source} has no rows; at least one is needed.")
    rows = forms.renamed(rows, column_map, source, may_lack=may_lack)
    rows = forms.with_own_prompts(rows[: num_rows or None], COMPLETION_COLUMNS[kind], source, tell)
    for number, row in enumerate(rows, start=1):
        if fault := _fault(row, kind):
            raise UserError(f"{source}, row {number}: {fault}.")
    return rows


def _read(
    dataset_name: str,
    split: str,
    config: str,
    revision: str,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[str, Iterator[Row]]:
    """What names a split, and its rows as they are."""
    source = f"{os.path.expanduser(dataset_name)} split {split!r}"
    if paths := files.data_files(dataset_name, split):
        part = hub.part_of(split)[1]
        name = os.fspath(paths[0]) if len(paths) == 1 else source
        return name, islice(files.read(paths), part.start, part.stop)
    data = hub.rows_of(dataset_name, split, config, revision)
    if commit := hub.commit_of(data):
        tell(f"{source} is of commit {commit}")
    return source, (row for p in data.with_format("arrow").iter(1000) for row in p.to_pylist())


def test_split(config: CommonConfig, dataset_name: str) -> str:
    """The split to evaluate on; "" where `auto` finds none.

    Raises:
        UserError: `dataset_test_split` names one that is not there, or nothing is there.
    """
    split, revision = config.dataset_test_split, options(config, dataset_name)
    source = (revision["dataset_config"], revision["dataset_revision"])
    if not split or dataset_name == "synthetic":
        return "validation" if split == AUTO else split
    if split != AUTO:
        _read(dataset_name, split, *source)
        return split
    path = Path(os.path.expanduser(dataset_name))
    if not path.exists():
        files.data_files(dataset_name, TEST_SPLITS[0])  # refuses what is no hub id either
    for name in TEST_SPLITS if not path.is_file() else ():
        if path.is_dir() and not hub.is_saved(path):
            if files.has_split(path, name):
                return name
            continue
        with contextlib.suppress(hub.NoSuchSplitError):
            hub.rows_of(dataset_name, name, *source)
            return name
    return ""


def has_pairs(config: CommonConfig, split: str) -> bool:
    """Whether a split's first row has a column `chosen` or `rejected`; says so where it has not.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    name = config.dataset_name
    if name == "synthetic":
        return True
    columns = next(_read(name, split, config.dataset_config, config.dataset_revision)[1], {})
    names = {old: new for new, old in config.renamed_columns.items()}
    found = not {"chosen", "rejected"}.isdisjoint(names.get(column, column) for column in columns)
    if not found:
        distributed.print_rank0(f"{name} has no columns chosen and rejected: prompts only")
    return found


def options(config: CommonConfig, dataset_name: str) -> dict[str, Any]:
    """How a run reads a data set, as arguments of `load_rows`.

    A configuration and a revision belong to the data set that they were given with, not to a second
    one; columns are renamed in both, where they are there.
    """
    is_main = dataset_name == config.dataset_name
    return {
        "dataset_config": config.dataset_config * is_main,
        "dataset_revision": config.dataset_revision * is_main,
        "column_map": config.renamed_columns,
        "may_lack": not is_main,
    }


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
    prompt = row["prompt"]
    if isinstance(row.get("source"), str):
        return str(row["source"])
    if isinstance(row.get("batch"), str) and "cnndm" in row["batch"]:
        return "cnn_dm"
    if prompt.startswith("SUBREDDIT: r/"):
        return "tldr"
    return "cnn_dm" if prompt.startswith("TITLE:") and "\n\nPOST:" not in prompt else "other"


# ---- the schema ----------------------------------------------------------------------------------


def _fault(row: Row, kind: str) -> str:
    """Why a row does not fit the schema of its kind, empty if it does."""
    for column in ("prompt", *COMPLETION_COLUMNS[kind]):
        if fault := _column_fault(row, column, kind):
            return f"column {column!r} {fault}"
        if is_messages(row[column]) != is_messages(row["prompt"]):
            return f"{column!r} and 'prompt' must both be text or both be messages"
        if column != "prompt" and is_messages(row[column]):
            roles = ", ".join(message["role"] for message in row[column])
            if roles != "assistant" and not (kind == "sft" and roles.startswith("assistant,")):
                return (
                    f"column {column!r} has messages of {roles} behind those that all completions "
                    "share; it must be one, of the assistant"
                )
    clash = sorted(row.keys() & ARGUMENTS) if kind == "prompts" else []
    rename = "has the name of a reward function's argument; rename it"
    return f"column {clash[0]!r} {rename}" if clash else ""


def _column_fault(row: Row, column: str, kind: str) -> str:
    """What is wrong with a text column, empty if nothing is."""
    if column not in row:
        way = forms.way_out(row, kind, column)
        if "messages" in row and not is_messages(row["messages"]):
            way = f"'messages' is no {LIST}{_odd(row['messages'])}"
        return f"is missing; the columns are {', '.join(map(repr, row)) or 'none'}: {way}"
    value = row[column]
    if not isinstance(value, str) and not is_messages(value):
        return f"holds {type(value).__name__}, it must be text or a {LIST}{_odd(value)}"
    text = value if isinstance(value, str) else "".join(map(content, value))
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may escape half of a pair, which no file can hold
        half = text[error.start].encode("unicode_escape").decode()
        return f"holds {half}, half of a surrogate pair, which is no character; remove it"
    return ""


def _odd(value: Any) -> str:
    """The first turn of a list that is no message, as the end of a sentence, and what would be."""
    turns = value if isinstance(value, list) else []
    turn = next((t for t in turns if not is_messages([t])), None)
    if not isinstance(turn, dict):
        return ""
    if "from" in turn:
        return "; docs/data.md has a short `map` for rows of ShareGPT"
    return f"; {reprlib.repr(turn)} is none: make its content one text"
