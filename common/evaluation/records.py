"""Records of an evaluation, `scores.jsonl` (of pairs) and `completions.jsonl` (of prompts).

Both files are complete: every number of `results.json` on pairs and on generations is a function
of them (`common/evaluation/summary.py`).

A line of `scores.jsonl` is one pair: dataset, split, row, prompt_sha256 (equal for equal prompts),
source, label_probability (null where the row has none), chosen_tokens, rejected_tokens, and
`scores`, from a system's name to its [chosen, rejected] scores.

A line of `completions.jsonl` is one prompt, a `PromptRecord`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np

from common.distributed import is_rank0
from common.errors import UserError
from common.evaluation.accuracy import Floats, finite_vector
from common.record.jsonl import json_line, read_jsonl, write_atomically
from common.text.example import Example

SCORES = "scores.jsonl"
COMPLETIONS = "completions.jsonl"
RESULTS = "results.json"
BASELINES = ("longer wins", "shorter wins", "ROUGE-L wins", "random guess")
REFERENCE = "reference completion"  # the name of a row's own completion


@dataclass
class PairScores:
    """N pairs with the scores (N, 2), chosen first, of every system."""

    pairs: list[dict[str, Any]]  # a line each, without the scores
    scores: dict[str, Floats] = field(default_factory=dict)

    def add(self, scores: Mapping[str, Floats]) -> None:
        """Add systems by name; a RuntimeError if a score is not finite."""
        for values in scores.values():
            finite_vector(values.ravel())
        self.scores |= scores


def describe_pairs(examples: Sequence[Example], dataset: str, split: str) -> list[dict[str, Any]]:
    """The lines of `scores.jsonl`, without the scores."""
    return [
        {
            "dataset": dataset,
            "split": split,
            "row": example.row,
            "prompt_sha256": hashlib.sha256(example.prompt.encode()).hexdigest(),
            "source": example.source,
            "label_probability": example.columns.get("label_probability"),
            "chosen_tokens": len(example.completions[0]),
            "rejected_tokens": len(example.completions[1]),
        }
        for example in examples
    ]


def read_scores(path: Path) -> PairScores:
    """Read `scores.jsonl`."""
    pairs = read_jsonl(path)
    lines = [pair.pop("scores") for pair in pairs]
    return PairScores(
        pairs, {name: np.array([line[name] for line in lines], float) for name in lines[0]}
    )


# ---- completions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """A completion with its measurements; None where one was not made, or has no meaning."""

    completion: str  # without the stop token
    num_tokens: int  # of the policies' tokenizer, stop token included
    stopped: bool  # False = ended by the length limit
    rewards: dict[str, float | None] = field(default_factory=dict)  # by judge
    kl: float | None = None  # log pi - log ref, nats: unbiased for KL(pi || ref) at temperature 1
    entropy: float | None = None  # of the policy at temperature 1, mean over tokens, nats
    rouge_1: float | None = None  # F1 with the row's own completion (Lin 2004)
    rouge_2: float | None = None
    rouge_l: float | None = None
    completion_ids: list[int] = field(default_factory=list)  # stop token included, as in the KL
    answers: dict[str, str | None] = field(default_factory=dict)  # by judges that extract one


@dataclass(frozen=True)
class Verdict:
    """The verdict of a judge on two completions of a prompt."""

    a: str  # name of a system, or REFERENCE
    b: str
    judge: str
    a_wins: float  # probability, or 1, 0.5 (a tie) or 0


@dataclass(frozen=True)
class PromptRecord:
    """A prompt with all its completions: a line of `completions.jsonl`."""

    id: int  # its row among the prompts
    prompt: str
    reference: Generation | None  # the row's completion
    systems: dict[str, Generation] = field(default_factory=dict)  # the first, compared and shown
    verdicts: list[Verdict] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)  # as the policies read it
    further: dict[str, list[Generation]] = field(default_factory=dict)  # samples after the first

    def of(self, name: str) -> Generation | None:
        """The first completion of a system, or the row's own; None if there is none."""
        return self.reference if name == REFERENCE else self.systems.get(name)

    def all_of(self, name: str) -> list[Generation]:
        """All completions of a system, or the row's own."""
        first = self.of(name)
        return [first, *self.further.get(name, [])] if first else []

    def pair(self, a: str, b: str) -> tuple[Generation, Generation] | None:
        """The first completions of both; None unless both exist."""
        first, second = self.of(a), self.of(b)
        return (first, second) if first and second else None


def system_names(records: Sequence[PromptRecord]) -> list[str]:
    """The systems in order, with REFERENCE last if a row has a completion."""
    names = list(records[0].systems) if records else []
    return [*names, REFERENCE] if any(record.reference for record in records) else names


def add_system(
    records: Sequence[PromptRecord], name: str, generations: Sequence[Generation]
) -> None:
    """Add the N*K completions of a system to the N records."""
    k = len(generations) // len(records)
    for i, record in enumerate(records):
        record.systems[name], *further = generations[i * k : (i + 1) * k]
        if further:
            record.further[name] = further


def read_completions(output_dir: Path) -> list[PromptRecord]:
    """Read `completions.jsonl`; [] without it."""
    return [typed(PromptRecord, line) for line in read_jsonl(output_dir / COMPLETIONS)]


def typed(kind: Any, value: Any) -> Any:
    """JSON as a value of a type; what a dataclass has no field for is left out."""
    arguments = get_args(kind)
    if isinstance(kind, UnionType):  # X | None
        return None if value is None else typed(arguments[0], value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = {name: typed(hints[name], value[name]) for name in hints if name in value}
        return kind(**fields)  # type: ignore[operator]
    if isinstance(value, list) and arguments:
        return [typed(arguments[0], each) for each in value]
    if isinstance(value, dict) and arguments:
        return {key: typed(arguments[1], each) for key, each in value.items()}
    return value


# ---- writing -------------------------------------------------------------------------------------


def write_records(
    table: PairScores, prompt_records: Sequence[PromptRecord], output_dir: Path
) -> None:
    """Write the records so far on rank 0, so that a judge that fails later loses none of them.

    Each file is replaced atomically; numbers are exact.
    """
    if not is_rank0():
        return
    if table.pairs:
        scored = (
            pair | {"scores": {name: scores[i].tolist() for name, scores in table.scores.items()}}
            for i, pair in enumerate(table.pairs)
        )
        write_atomically(output_dir / SCORES, map(json_line, scored))
    if prompt_records:
        lines = map(json_line, map(asdict, prompt_records))
        write_atomically(output_dir / COMPLETIONS, lines)


@contextmanager
def kept(
    table: PairScores, prompt_records: Sequence[PromptRecord], output_dir: Path
) -> Iterator[None]:
    """Write the records before the block and at its end; a UserError inside says where they are."""
    write_records(table, prompt_records, output_dir)
    try:
        yield
    except UserError as error:
        error.add(f"; what was measured before is in {output_dir}")
        raise
    finally:
        write_records(table, prompt_records, output_dir)
