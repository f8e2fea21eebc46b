"""The rows that a proxy reward is learned from, and those in which it is optimised without RL."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.data import Example
from common.errors import UserError
from common.experiments import stages
from common.noise import derive_seed, permutation
from common.pairs.from_rollouts import PairReport, write_jsonl
from common.record.jsonl import json_line
from common.sampling.sampler import Rollouts
from common.text.rows import load_rows

MARK = "made_by.json"


def choose(num_rows: int, wanted: int, seed: int, what: str) -> list[int]:
    """Row numbers of this seed, in its own order.

    Raises:
        UserError: there are not as many.
    """
    if wanted > num_rows:
        raise UserError(f"--{what} is {wanted}; the data set has {num_rows} rows to take from.")
    return permutation(num_rows, derive_seed(seed, what), 0)[:wanted]


def write_proxy_pairs(
    path: Path, dataset_name: str, split: str, num_pairs: int, seed: int, **options: Any
) -> None:
    """Write the pairs that a seed's proxy learns from, as rows that a stage reads.

    Raises:
        UserError: the data set cannot be read or has too few.
    """
    rows = load_rows(dataset_name, split, kind="preference", seed=0, **options)
    chosen = choose(len(rows), num_pairs, seed, "num_proxy_pairs")
    write_lines(path, [rows[i] for i in chosen])


def write_optimised(
    folder: Path,
    made_by: Mapping[str, Any],
    examples: Sequence[Example],
    rollouts: Rollouts,
    texts: Sequence[str],
    rewards: Tensor,
    sizes: Sequence[int],
) -> None:
    """Write for each n the best of the first n completions of every prompt, and labelled pairs.

    Args:
        folder: gets `best_of_{n}.jsonl` and `pairs.jsonl`; a mark of what made them comes last.
        made_by: for `are_written`.
        examples: N prompts.
        rollouts: K completions of each, with their N*K texts.
        texts: see there.
        rewards: (N, K) of the proxy.
        sizes: the n.
    """
    (folder / MARK).unlink(missing_ok=True)  # of other rows, which these replace one by one
    num_candidates = rewards.shape[1]
    for size in sizes:
        best = rewards[:, :size].argmax(1) + torch.arange(len(examples)) * num_candidates  # (N,)
        rows = [
            {"prompt": example.prompt, "completion": texts[place]}
            for example, place in zip(examples, best.tolist(), strict=True)
            if texts[place].strip()
        ]
        write_lines(folder / f"best_of_{size}.jsonl", rows)
    report = PairReport()
    neighbours = labelled_neighbours(rewards)
    report.add(range(len(examples)), rollouts, texts, rewards, neighbours)
    print(report, flush=True)
    write_jsonl(folder / "pairs.jsonl", report.pairs, examples)
    stages.write_mark(folder, made_by, MARK)


def are_written(folder: Path, made_by: Mapping[str, Any]) -> bool:
    """Whether `write_optimised` was here for the same thing, and came to its end."""
    return stages.read_mark(folder, MARK) == made_by


def labelled_neighbours(rewards: Tensor) -> Tensor:
    """Each candidate against its neighbour, two independent draws of the policy: (N, K / 2, 2).

    Indices of the candidates of `rewards`, (N, K) with an even K, the higher reward first.
    """
    scores = rewards.view(len(rewards), -1, 2)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    return order + torch.arange(0, rewards.shape[1], 2)[:, None]


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(json_line, rows)), encoding="utf-8")
