"""Judges: Python functions that compare two completions.

A judge is `path/to/file.py:function`, which is run as code, with the signature

    judge(prompts, completions_a, completions_b, **columns) -> list of verdicts

All are lists of N: texts, and for each column of the rows its values. A verdict is the probability
that a wins, or 1, 0.5 (a tie) and 0; None where the judge does not apply. The order of the two
completions is drawn for every prompt, so a judge that prefers the first one favours no system. A
function without `**columns` gets the columns that it names. It may be a coroutine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from common import distributed
from common.errors import UserError, naming
from common.evaluation.records import PromptRecord, Verdict, system_names
from common.noise import derive_seed, uniform
from common.rewards.functions import as_number, call_once
from common.text.example import Example

Judge = Callable[..., Any]


def add_verdicts(
    records: Sequence[PromptRecord],
    judges: Mapping[str, Judge],
    examples: Sequence[Example],
    seed: int,
) -> None:
    """Add the verdicts of every judge, by name, on every two systems to the records. Collective.

    Only rank 0 calls the judges, which may be paid services. They get the columns of the examples.
    The seed decides the order of the two completions. The verdicts before one that fails stay.
    """
    with distributed.together():
        pairs = product(judges.items(), combinations(system_names(records), 2))
        for (name, judge), (b, a) in pairs if distributed.is_rank0() else ():
            for i, verdict in verdicts_of(records, a, b, name, judge, examples, seed):
                records[i].verdicts.append(verdict)
    verdicts = distributed.from_rank0([record.verdicts for record in records])
    for record, of_rank0 in zip(records, verdicts, strict=True):
        record.verdicts[:] = of_rank0


def verdicts_of(
    records: Sequence[PromptRecord],
    a: str,
    b: str,
    name: str,
    judge: Judge,
    examples: Sequence[Example],
    seed: int,
) -> Iterator[tuple[int, Verdict]]:
    """The verdicts of one judge on two systems, each with the index of its record."""
    order = derive_seed(seed, "order", a, b)
    swapped = [bool(uniform(order, record.id) < 0.5) for record in records]  # b's comes first
    pairs = {i: pair for i, record in enumerate(records) if (pair := record.pair(a, b))}
    inputs = {key: [examples[i].columns[key] for i in pairs] for key in examples[0].columns}
    inputs["prompts"] = [records[i].prompt for i in pairs]
    inputs["completions_a"] = [pair[swapped[i]].completion for i, pair in pairs.items()]
    inputs["completions_b"] = [pair[not swapped[i]].completion for i, pair in pairs.items()]
    title = f"judge function {name!r}"
    with naming(title, f"on {len(pairs)} completions of {a!r} and {b!r}"):
        values = call_once(judge, inputs, len(pairs), title, "verdicts")
    for i, value in zip(pairs, values, strict=True):
        if value is None:
            continue
        number = as_number(value)
        if number is None or not 0 <= number <= 1:
            raise UserError(
                f"{title} returned {value!r} for prompt {records[i].id}; a verdict must be None or "
                "a number from 0 to 1."
            )
        yield i, Verdict(a, b, name, 1 - number if swapped[i] else number)
