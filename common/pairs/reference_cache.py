"""Reference log-probabilities on disk, so that a second run need not compute them.

A file is named after everything its numbers depend on: the reference's weights and configuration,
the rows as token ids, the tokenizer, the limits that truncate, the dtype, `ld_alpha`, the versions
of the libraries and the code that scores. The layout, the micro-batches and the number of ranks are
not among them, since they change no score; neither is which of the rows a run trains on: what a
file lacks is computed and added.

The body of a file (`text/checked_file.py`) is an `.npy` of two numbers for each row, NaN where a
row was not scored yet. Rank 0 reads and writes.
"""

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import distributed
from common.config import CommonConfig
from common.data import Example
from common.model import lora
from common.text import checked_file

PACKAGES = ("torch", "transformers")
# Of a model's configuration: where it was read from and who wrote it, which change no score.
ORIGIN = ("_name_or_path", "transformers_version")


def weights_digest(lm: Any) -> str:
    """SHA-256 of a Hugging Face model's configuration, weights and buffers. Collective.

    Of a model with adapters it is that of the model before they were trained.

    Call it before the model is sharded, while rank 0 has all of it: rank 0's digest is returned on
    every rank.
    """
    digest = hashlib.sha256()
    if distributed.is_rank0():
        fields = {k: v for k, v in lm.config.to_dict().items() if k not in ORIGIN}
        fields["adapter_scales"] = lora.reference_scales(lm)
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
        for name, tensor in sorted(lora.reference_state(lm).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    result: str = distributed.from_rank0(digest.hexdigest())
    return result


def file_for(
    folder: str,
    weights: str,
    examples: Sequence[Example],
    tokenizer: Any,
    config: CommonConfig,
    *,
    ld_alpha: float = 1.0,
) -> Path | None:
    """Where the log-probabilities of these pairs are, or belong; None where they are not kept.

    Args:
        folder: Folder of the cache; empty: no cache.
        weights: As `weights_digest` gives it.
        examples: All pairs of the split, in their order.
        tokenizer: What made the ids; a change that changes no id of these rows still renames.
        config: Of the run; the fields that decide on scores are read.
        ld_alpha: See `common.losses.sequence_logps`.
    """
    if not folder:
        return None
    description = {
        "weights": weights,
        "tokenizer": [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())],
        "truncation": [
            config.max_prompt_length,
            config.max_completion_length,
            config.prompt_truncation,
        ],
        "dtype": "bfloat16" if config.bf16 else "float32",
        "ld_alpha": ld_alpha,
        "versions": {name: package_version(name) for name in PACKAGES},
        "code": checked_file.code_digest(),
    }
    digest = hashlib.sha256()
    # Each part is as long as an earlier one says: no two inputs give the same bytes.
    digest.update(hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest())
    for example in examples:
        parts = [example.prompt_ids, *example.completions]
        lengths = [len(parts), *map(len, parts)]
        digest.update(np.array([*lengths, *(i for ids in parts for i in ids)], "<i8").tobytes())
    return Path(folder) / f"{digest.hexdigest()}.logps"


def complete(
    file: Path | None,
    num_rows: int,
    rows: Sequence[int],
    score: Callable[[Sequence[int]], Tensor],
) -> Tensor:
    """Reference log-probabilities of these rows: from the file, and computed where it lacks them.

    Collective.

    Args:
        file: Where they are kept; None: nowhere.
        num_rows: Rows of the split, N.
        rows: Those that are needed.
        score: Scores the rows it is given: (N, 2) float64, NaN elsewhere. Collective.

    Returns:
        (N, 2) float64 on the host, the same on every rank; NaN may stand in rows not asked for.
    """
    known: Tensor | None = None
    if file is not None:
        # Rank 0 decides for all: on machines without a common disk the others would find nothing,
        # and wait for ranks that do not compute.
        known = distributed.from_rank0(read(file, num_rows) if distributed.is_rank0() else None)
    if known is None:
        known = torch.full((num_rows, 2), torch.nan, dtype=torch.float64)
    is_known = ~known.isnan().any(1)  # (N,)
    missing = [row for row in rows if not is_known[row]]
    if not missing:
        distributed.print_rank0(f"reference log-probabilities of {len(rows)} pairs from {file}")
        return known
    known = torch.where(is_known[:, None], known, score(missing))
    if file is not None and distributed.is_rank0():
        write(file, known)
    return known


def read(file: Path, num_rows: int) -> Tensor | None:
    """The numbers (N, 2) as `write` was given them, None where there are none.

    A damaged file is reported.
    """
    if not file.exists():
        return None
    body = checked_file.read(file)
    if body is None:
        print(f"warning: {file} is damaged; its log-probabilities are computed again.", flush=True)
        return None
    stored = torch.from_numpy(np.load(io.BytesIO(body), allow_pickle=False))
    assert stored.shape == (num_rows, 2), f"{file} holds {tuple(stored.shape)} for {num_rows} rows"
    return stored


def write(file: Path, logps: Tensor) -> None:
    """Keep the numbers (N, 2). A disk that refuses is warned about."""
    buffer = io.BytesIO()
    np.save(buffer, logps.numpy(), allow_pickle=False)
    checked_file.keep(file, buffer.getbuffer(), "reference log-probabilities", "ref_cache_dir")
