"""Sources of rows: local files, folders of `save_to_disk`, the hub, the synthetic data set."""

import functools
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common import distributed
from common.config.stages import CommonConfig
from common.errors import UserError, gist, why_missing
from common.text import synthetic
from common.text.schemas import COMPLETION_COLUMNS, RawRow

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
# Commits of what was read from the hub, by name; "" of a folder
dataset_commits: dict[str, str] = {}
HUB_TIMEOUT = 5  # seconds for the hub's first answer
ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
OURS = ("assets", "data", "output")  # folders that recipes name, there or not
SHARD = r"-\d+-of-(?P<shards>\d+)(?:-\w+)?"  # in the name of a file behind its split
NO_ID = "and is no hub id (`name` or `owner/name`, where no folder `owner` is here)"


class NoSuchSplitError(UserError):
    """The data set exists, the split does not."""


def read_split(
    config: CommonConfig,  # its `column_map` renames columns; a second data set may lack them
    dataset_name: str,  # `synthetic`, a file, a folder (also of `save_to_disk`) or a hub id
    split: str,  # no other one takes its place; some of its rows, from 0: `train[160:320]`
    kind: str,  # as in `load_examples`
    num_rows: int = 0,  # take the first rows only; 0 takes all
) -> tuple[str, list[RawRow]]:
    """The name of a split in messages, and its rows as they are, with their columns renamed.

    A file is the split `train`, or the one it is named after (`validation.jsonl`). A folder has a
    file, or shards `split-00000-of-00002.parquet`, per split, also in its subfolder `data`. A
    UserError if the split has no rows, or cannot be read.
    """
    if dataset_name == "synthetic":
        name, row_slice = parse_split(split)
        limit = row_slice.stop or (num_rows and (row_slice.start or 0) + num_rows)
        return name, synthetic.make_rows(kind, name, limit)[row_slice][: num_rows or None]
    label, unread = open_split(config, dataset_name, split)
    rows = list(distributed.progress_bar("reading", None, unit="row", items=unread))
    if not rows:
        raise UserError(f"{label} has no rows; at least one is needed.")
    may_lack = dataset_name != config.dataset_name
    column_map = column_map_of(config, kind)
    return label, rename_columns(rows, column_map, label, may_lack=may_lack)[: num_rows or None]


def open_split(config: CommonConfig, dataset_name: str, split: str) -> tuple[str, Iterator[RawRow]]:
    """The split's name in messages, and an iterator over its unchecked rows.

    A configuration belongs to the data set that it was given with, not to a second one.
    """
    label = f"{os.path.expanduser(dataset_name)} split {split!r}"
    if files := data_files(dataset_name, split):
        row_slice = parse_split(split)[1]
        rows = (row for file in files for row in read_file(file))
        label = os.fspath(files[0]) if len(files) == 1 else label
        return label, islice(rows, row_slice.start, row_slice.stop)
    is_main = dataset_name == config.dataset_name
    data = rows_of(dataset_name, split, config.dataset_config * is_main)
    tables = data.with_format("arrow").iter(1000)
    return label, (row for table in tables for row in rows_of_table(table))


def column_map_of(config: CommonConfig, kind: str) -> dict[str, str]:
    """Old names of columns by new ones, as they concern rows of that kind.

    `completion=chosen` is for SFT: pairs of the same run keep their column `chosen`.
    """
    columns, known = COMPLETION_COLUMNS[kind], {c for cs in COMPLETION_COLUMNS.values() for c in cs}
    return {
        new: old
        for new, old in config.renamed_columns.items()
        if old not in columns or new in columns or new not in known
    }


def rename_columns(
    rows: list[RawRow], column_map: dict[str, str], label: str, *, may_lack: bool
) -> list[RawRow]:
    """Rename columns, old names by new ones; a UserError for one that is missing or taken."""
    if not column_map:
        return rows
    columns = dict.fromkeys(name for row in rows for name in row)
    for new, old in column_map.items():
        flag = f"--column_map has {new}={old}"
        if old not in columns and not may_lack:
            listed = ", ".join(map(repr, columns))
            raise UserError(f"{flag}; {label} has no column {old!r}, it has: {listed}.")
        if old in columns and new in columns and new not in column_map.values():
            raise UserError(
                f"{flag}, and {label} has a column {new!r}, which that would replace; give it "
                f"another name too, as other_{new}={new}."
            )
    names = {old: new for new, old in column_map.items()}
    return [{names.get(name, name): cell for name, cell in row.items()} for row in rows]


def parse_split(split: str) -> tuple[str, slice]:
    """Split `name[start:end]` into the name and the slice of its rows."""
    match = re.fullmatch(r"(.*)\[(\d*):(\d*)\]", split)
    if match is None:
        return split, slice(None)
    return match[1], slice(*(int(end) if end else None for end in match.groups()[1:]))


def split_names(dataset_name: str, config: str = "") -> list[str]:
    """The splits of a data set by name; [] of a single file, and of a hub id that is not there."""
    import datasets

    path = Path(os.path.expanduser(dataset_name))
    if is_saved(path):
        return [*saved_splits(os.fspath(path))]
    if path.is_dir():
        names = [re.split(SHARD, file.name.partition(".")[0])[0] for file in files_of(path)]
        return [*dict.fromkeys(names)]
    if path.exists() or not may_be_id(dataset_name):
        return []
    is_reachable()
    try:
        return [*datasets.get_dataset_split_names(dataset_name, config or None)]
    except (OSError, ValueError, datasets.exceptions.DatasetsError):
        return []


def files_of(folder: Path) -> list[Path]:
    """The files of rows in a folder and its subfolder `data`, in order.

    What `datasets` saves about a data set, in `dataset_info.json` or `dataset_infos.json`, is none.
    """
    return sorted(
        file
        for directory in (folder, folder / "data")
        for file in (directory.iterdir() if directory.is_dir() else ())
        if file.name.endswith(SUFFIXES) and not file.name.startswith("dataset_info")
    )


def data_files(dataset_name: str, split: str) -> list[Path]:
    """The files of one split; none for a folder of `save_to_disk` and for a hub id."""
    split, _ = parse_split(split)
    path = Path(os.path.expanduser(dataset_name))  # Path's own raises for an unknown ~user
    if is_saved(path):
        return []
    if path.is_dir():
        return _split_files(path, split)
    is_named = path.name.endswith(SUFFIXES)
    if path.is_file():
        if not is_named:
            raise UserError(f"dataset_name {os.fspath(path)!r} must end in {', '.join(SUFFIXES)}.")
        if split not in ("train", path.name.split(".")[0]):
            raise UserError(
                f"dataset_name {os.fspath(path)!r} is a single file, which is the split 'train', "
                f"not {split!r}; put {split}.jsonl next to train.jsonl in a folder, or leave "
                "--dataset_test_split out."
            )
        return [path]
    if is_named or not may_be_id(dataset_name):
        advice = why_missing(dataset_name)
        if not advice and dataset_name.startswith("data/") and not is_named:
            advice = "; where a recipe names it, the make_rows.py next to the recipe makes it"
        advice = advice or f" {NO_ID}; give a file or a folder"
        raise UserError(f"dataset_name {dataset_name!r} does not exist{advice}.")
    return []


def naming_flags(folder: Path) -> str:
    """Advice with the flags that name a folder's splits."""
    names = split_names(os.fspath(folder))
    example = names[0] if names else "NAME"
    return (
        f"name a split by --dataset_test_split {example} or --dataset_train_split {example}, or "
        "another folder"
    )


def _split_files(folder: Path, split: str) -> list[Path]:
    """The file or the shards of one split in a folder, in order."""
    files = files_of(folder)
    name = re.compile(re.escape(split) + rf"({SHARD})?(\.\w+)+")
    matches = {file: m for file in files if (m := name.fullmatch(file.name))}
    there = ", ".join(os.fspath(file.relative_to(folder)) for file in files) or "no data files"
    if not matches:
        raise NoSuchSplitError(
            f"folder {os.fspath(folder)!r} has no file for the split {split!r} ({split}.jsonl, "
            f".jsonl.gz, .json or .parquet), it has: {there}; {naming_flags(folder)}."
        )
    shards = [match["shards"] for match in matches.values()]
    if len(matches) != int(shards[0] or 1) or len(set(shards)) > 1:
        raise UserError(
            f"folder {os.fspath(folder)!r} must have one file for the split {split!r}, or all its "
            f"shards once; it has: {there}."
        )
    return list(matches)


def read_file(path: Path) -> Iterator[RawRow]:
    """The rows of one file; a UserError that names the line or row if it cannot be read.

    By `json`, not by `datasets.load_dataset("json")`, which changes cells: dates in text become
    times, "007" becomes 7 behind 10 MB of numbers, an object gets the keys of others, numbers of a
    list are rounded (seen in datasets 5.2).
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # type: ignore[import-untyped]

            file = pyarrow.parquet.ParquetFile(path)
            for batch in file.iter_batches():
                yield from rows_of_table(batch)
            return
        mode: Any = {"mode": "rt", "encoding": "utf-8-sig", "newline": "\n"}  # not at U+2028
        with gzip.open(path, **mode) if path.suffix == ".gz" else path.open(**mode) as stream:
            yield from _json_rows(stream, os.fspath(path))
    except UserError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError, OverflowError, zlib.error) as error:
        # pyarrow raises the first two, NotImplementedError, and OverflowError for dates that Python
        # cannot hold.
        raise UserError(f"{os.fspath(path)} cannot be read: {gist(error)}.") from None


def rows_of_table(table: Any) -> list[RawRow]:
    """Rows of an Arrow table; its cells of JSON are decoded, as in the rows of `datasets`.

    Its formatter would open images and sounds too, which are bytes here.
    """
    rows: list[RawRow] = table.to_pylist()
    fields = [field for field in table.schema if "arrow.json" in str(field.type)]
    if not fields:
        return rows
    import datasets
    import pyarrow

    features = datasets.Features.from_arrow_schema(pyarrow.schema(fields))
    return [row | features.decode_example({key: row[key] for key in features}) for row in rows]


def _json_rows(stream: Any, file: str) -> Iterator[RawRow]:
    """Rows of a JSON list of objects, or of one object per line."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        is_list = line.lstrip().startswith("[")
        try:
            rows = json.loads(line + stream.read()) if is_list else [json.loads(line)]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, from line {number} on: {gist(error)}.") from None
        for index, row in enumerate(rows, start=1 if is_list else number):
            if not isinstance(row, dict):
                where, kind = "row" if is_list else "line", type(row).__name__
                raise UserError(f"{file}, {where} {index}: expected named columns, found {kind}.")
            yield row


# ---- data sets of `save_to_disk` and of the hub --------------------------------------------------


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
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        except Exception:  # what its HTTP library raises; which one that is depends on its version
            constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def is_saved(folder: str | Path) -> bool:
    """Whether `save_to_disk` has written a folder: of several splits, or of one, named `train`."""
    is_one = all(Path(folder, name).is_file() for name in ("state.json", "dataset_info.json"))
    return is_one or Path(folder, "dataset_dict.json").is_file()


def saved_splits(folder: str) -> dict[str, Any]:
    """The splits in a folder of `save_to_disk`, by name; a UserError if it cannot be read."""
    import datasets

    try:
        saved = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:  # a file is missing or cut short
        raise UserError(f"{folder} cannot be read by datasets: {gist(error)}.") from None
    return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}


@functools.lru_cache(1)
def rows_of(name: str, split: str, config: str) -> Any:
    """A split of a saved or a hub data set; a UserError at once if it cannot be read.

    The commit of a hub data set is printed, and kept in `dataset_commits`.
    """
    import datasets

    if is_saved(folder := os.path.expanduser(name)):
        splits, (base, rows) = saved_splits(folder), parse_split(split)
        if base not in splits:
            raise NoSuchSplitError(
                f"dataset_name {name!r} has no split {base!r}; it has {[*splits]}; "
                f"{naming_flags(Path(folder))}."
            )
        return splits[base].select(range(len(splits[base]))[rows])
    is_reachable()
    try:
        data = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # `datasets` 5.2 raises a plain ValueError for an unknown split.
        kind = NoSuchSplitError if str(error).startswith("Unknown split") else UserError
        raise kind(
            f"dataset_name {name!r} (split {split!r}) is no local file or folder and cannot be "
            f"loaded from the hub: {str(error).rstrip('.')}{why_missing(name)}."
        ) from None
    # Its library names the folder of its cache by the commit.
    files = " ".join(str(file["filename"]) for file in data.cache_files)
    commit = re.search(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])", files)
    if commit and dataset_commits.get(name) != commit[0]:
        dataset_commits[name] = commit[0]
        distributed.print_rank0(f"{name} is of commit {commit[0]}")
    return data
