"""Rows from the hub, from local files or from the embedded task, checked against TRL's schemas."""

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from common import distributed
from common.config.flags import AUTO
from common.config.stages import CommonConfig
from common.errors import UserError
from common.text import schemas, sources
from common.text.rows import RawRow

HELD_OUT_SPLITS = ("validation", "test")  # of which AUTO takes the first that is there


def load_rows(
    config: CommonConfig, dataset_name: str, split: str, kind: str, num_rows: int = 0
) -> list[RawRow]:
    """Read one split and check every row against the schema of its kind.

    A file is the split `train`, or the one it is named after (`validation.jsonl`). A folder has a
    file, or shards `split-00000-of-00002.parquet`, per split, also in its subfolder `data`.

    Args:
        config: Its `column_map` renames columns of every data set; a second one may lack them.
        dataset_name: `synthetic`; a file (.jsonl, .jsonl.gz, .json, .parquet); a folder, also one
            that `save_to_disk` has written; or a hub id.
        split: Name of the split, no other one takes its place; of some of its rows, counted from 0,
            as in `datasets`: `train[160:320]`.
        kind: `sft` (prompt, completion; or messages, of which every answer is trained),
            `preference` (prompt, chosen, rejected; without a `prompt` column it is the prefix that
            both texts share) or `prompts` (prompt). Other columns are kept as they are.
        num_rows: Take the first rows only; 0 takes all.

    Returns:
        At least one row, of texts or of messages: then a completion is one, of the assistant. Any
        may be blank. A prompt that completions repeat is cut from them.

    Raises:
        UserError: Names the file or split, the row (counted from 1) and the column.
    """
    if dataset_name == "synthetic":
        from common.text import synthetic

        name, row_slice = sources.parse_split(split)
        limit = row_slice.stop or (num_rows and (row_slice.start or 0) + num_rows)
        return synthetic.make_rows(kind, name, limit)[row_slice][: num_rows or None]
    label, unchecked = _open_split(config, dataset_name, split)
    rows = list(distributed.progress_bar("reading", None, unit="row", items=unchecked))
    if not rows:
        raise UserError(f"{label} has no rows; at least one is needed.")
    may_lack = dataset_name != config.dataset_name
    rows = schemas.rename_columns(rows, config.renamed_columns, label, may_lack=may_lack)
    return schemas.standardise(rows[: num_rows or None], kind, label)


def _open_split(
    config: CommonConfig, dataset_name: str, split: str
) -> tuple[str, Iterator[RawRow]]:
    """The split's name in messages, and an iterator over its unchecked rows.

    Configuration and revision belong to the data set that they were given with, not to a second.
    """
    label = f"{os.path.expanduser(dataset_name)} split {split!r}"
    if files := sources.data_files(dataset_name, split):
        row_slice = sources.parse_split(split)[1]
        rows = (row for file in files for row in sources.read_file(file))
        label = os.fspath(files[0]) if len(files) == 1 else label
        return label, islice(rows, row_slice.start, row_slice.stop)
    is_main = dataset_name == config.dataset_name
    subset, revision = config.dataset_config * is_main, config.dataset_revision * is_main
    data = sources.rows_of(dataset_name, split, subset, revision)
    tables = data.with_format("arrow").iter(1000)
    return label, (row for table in tables for row in sources.rows_of_table(table))


def held_out_split(config: CommonConfig, dataset_name: str, *, is_trained_on: bool = False) -> str:
    """The split to evaluate on: what `--dataset_test_split` names, or `auto` finds; "" for none.

    `auto` is `validation`, else `test`, of what is there. A single file has one split: it is
    evaluated on unless the run trains on it.

    Raises:
        UserError: the split that was named is not there, or nothing is.
    """
    split = config.dataset_test_split
    if not dataset_name or not split:
        return ""
    if dataset_name == "synthetic":
        return "validation" if split == AUTO else split
    if split != AUTO:
        _open_split(config, dataset_name, split)
        return split
    path = Path(os.path.expanduser(dataset_name))
    if path.is_file() and not is_trained_on:
        return path.name.split(".")[0]
    for name in HELD_OUT_SPLITS if not path.is_file() else ():
        with contextlib.suppress(sources.NoSuchSplitError):
            _open_split(config, dataset_name, name)
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
    columns = next(_open_split(config, name, split)[1], {})
    names = {old: new for new, old in config.renamed_columns.items()}
    has_one = not {"chosen", "rejected"}.isdisjoint(names.get(name, name) for name in columns)
    if not has_one:
        distributed.print_rank0(f"{name} has no columns chosen and rejected: prompts only")
    return has_one
