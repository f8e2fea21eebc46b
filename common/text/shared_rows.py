"""Tokenised rows on disk that every process of a machine maps into memory."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.text.example import Example

MIN_ROWS = 1000  # of fewer every process makes its list


class MappedRows(Sequence[Example]):
    """Examples in a folder made by `write`, each decoded when it is read."""

    def __init__(self, folder: Path) -> None:
        """Map the folder, which may be removed afterwards."""
        import datasets

        self.rows = datasets.load_from_disk(str(folder))
        columns = self.rows.with_format("numpy")
        self.lengths = columns["lengths"][:]  # (rows, 1 + K) int64, of prompt and completions

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """An example, or a list of some."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        cell = self.rows[range(len(self))[index]]["example"]
        return Example(**json.loads(cell))


def write(folder: Path, examples: Sequence[Example]) -> None:
    """Write examples, all with as many completions.

    Nothing is left where JSON cannot hold their columns, or the disk is full.
    """
    import datasets

    try:
        cells = [json.dumps(vars(example)) for example in examples]
    except TypeError:  # of a Parquet file's dates, for example
        return
    lengths = [[len(e.prompt_ids), *map(len, e.completions)] for e in examples]
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"example": cells, "lengths": lengths})
    try:
        rows.save_to_disk(str(folder))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
