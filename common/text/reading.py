"""Rows from the hub, from local files or from the embedded task, checked against TRL's schemas."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import distributed
from common.config.fields import AUTO
from common.config.stages import CommonConfig
from common.errors import UserError
from common.text import schemas, sources
from common.text.data_report import progress
from common.text.rows import COMPLETION_COLUMNS, RawRow

TEST_SPLITS = ("validation", "test")  # of which AUTO takes the first that is there


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
) -> list[RawRow]:
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
        column_map: Columns to rename, old names by new ones.
        may_lack: Columns of the map need not be there.
        tell: Called with each note on the rows.

    Returns:
        At least one row, of texts or of messages: then a completion is one, of the assistant. Any
        may be blank. A prompt that completions repeat is cut from them.

    Raises:
        UserError: Names the file or split, the row (counted from 1) and the column.
    """
    assert kind in COMPLETION_COLUMNS, kind
    if dataset_name == "synthetic":
        from common.text import synthetic

        name, share = sources.part_of(split)
        limit = share.stop or (num_rows and (share.start or 0) + num_rows)
        return synthetic.make_rows(kind, name, limit)[share][: num_rows or None]
    source, unchecked = _read(dataset_name, split, dataset_config, dataset_revision, tell)
    rows = list(progress(unchecked, "reading"))
    if not rows:
        raise UserError(f"{source} has no rows; at least one is needed.")
    rows = schemas.rename_columns(rows, column_map, source, may_lack=may_lack)
    return schemas.standardise(rows[: num_rows or None], kind, source, tell)


def _read(
    dataset_name: str,
    split: str,
    config: str,
    revision: str,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[str, Iterator[RawRow]]:
    """A name of a split for messages, and its rows, unchecked."""
    source = f"{os.path.expanduser(dataset_name)} split {split!r}"
    if paths := sources.data_files(dataset_name, split):
        share = sources.part_of(split)[1]
        name = os.fspath(paths[0]) if len(paths) == 1 else source
        return name, islice(sources.read(paths), share.start, share.stop)
    data = sources.rows_of(dataset_name, split, config, revision)
    if commit := sources.commit_of(data):
        sources.dataset_commits[dataset_name] = commit
        tell(f"{source} is of commit {commit}")
    return source, (row for p in data.with_format("arrow").iter(1000) for row in p.to_pylist())


def test_split(config: CommonConfig, dataset_name: str) -> str:
    """The split to evaluate on; "" where `auto` finds none.

    Raises:
        UserError: `dataset_test_split` names one that is not there, or nothing is there.
    """
    split, source = config.dataset_test_split, options(config, dataset_name)
    subset, revision = source["dataset_config"], source["dataset_revision"]
    if not split or dataset_name == "synthetic":
        return "validation" if split == AUTO else split
    if split != AUTO:
        _read(dataset_name, split, subset, revision)
        return split
    path = Path(os.path.expanduser(dataset_name))
    if not path.exists():
        sources.data_files(dataset_name, TEST_SPLITS[0])  # refuses what is no hub id either
    for name in TEST_SPLITS if not path.is_file() else ():
        if path.is_dir() and not sources.is_saved(path):
            if sources.has_split(path, name):
                return name
            continue
        with contextlib.suppress(sources.NoSuchSplitError):
            sources.rows_of(dataset_name, name, subset, revision)
            return name
    return ""


def has_pairs(config: CommonConfig, split: str) -> bool:
    """Whether a split's first row has a column `chosen` or `rejected`; prints a note if not.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    name = config.dataset_name
    if name == "synthetic":
        return True
    columns = next(_read(name, split, config.dataset_config, config.dataset_revision)[1], {})
    names = {old: new for new, old in config.renamed_columns.items()}
    has_one = not {"chosen", "rejected"}.isdisjoint(names.get(name, name) for name in columns)
    if not has_one:
        distributed.print_rank0(f"{name} has no columns chosen and rejected: prompts only")
    return has_one


def options(config: CommonConfig, dataset_name: str) -> dict[str, Any]:
    """Arguments of `load_rows` for a data set of a run.

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
