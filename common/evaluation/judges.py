"""Python functions that compare two completions: found by name, called, checked.

A judge is `path/to/file.py:function`, which is run as code, with the signature

    judge(prompts, completions_a, completions_b, **columns) -> list of verdicts

All are lists of N: texts, and for each column of the rows its values. A verdict is the probability
that a wins, or 1, 0.5 (a tie) and 0; None where the judge does not apply. Which of two completions
is given as a is drawn for every prompt anew, so that a judge that prefers the first one gains no
system anything. A function without `**columns` gets what it names, and it may be a coroutine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from common import distributed
from common.errors import UserError
from common.evaluation.records import PromptRecord, Verdict, system_names
from common.noise import derive_seed, uniform

if TYPE_CHECKING:
    from common.data import Example

Judge = Callable[..., Any]


def with_verdicts(
    answers: Sequence[PromptRecord],
    judges: Mapping[str, Judge],
    examples: Sequence["Example"],
    seed: int,
) -> list[PromptRecord]:
    """The answers with what every judge, by name, says of every two systems. Collective.

    Rank 0 asks; a judge that calls somebody else's model is not asked by every rank. Judges get the
    columns of the examples; the seed is that of the order in which completions are given.
    """
    found: list[list[Verdict]] = [row.verdicts for row in answers]
    if distributed.is_rank0():
        for name, judge in judges.items():
            for b, a in combinations(system_names(answers), 2):
                rows = ask(answers, a, b, name, judge, examples, seed)
                found = [own + new for own, new in zip(found, rows, strict=True)]
    found = distributed.from_rank0(found)
    return [replace(row, verdicts=own) for row, own in zip(answers, found, strict=True)]


def ask(
    answers: Sequence[PromptRecord],
    a: str,
    b: str,
    name: str,
    judge: Judge,
    examples: Sequence["Example"],
    seed: int,
) -> list[list[Verdict]]:
    """The verdicts of one judge on two systems, N lists of one or none.

    Raises:
        UserError: the judge returned what are no N verdicts.
    """
    from common.rewards.functions import as_number, call_once

    swapped = [is_swapped(seed, a, b, row.id) for row in answers]
    orders = [(b, a) if swap else (a, b) for swap in swapped]
    rows = [i for i, row in enumerate(answers) if row.pair(a, b)]
    given = {key: [examples[i].columns[key] for i in rows] for key in examples[0].columns}
    given["prompts"] = [answers[i].prompt for i in rows]
    for side, key in enumerate(("completions_a", "completions_b")):
        given[key] = [text_of(answers[i], orders[i][side]) for i in rows]
    values = call_once(judge, given, len(rows), f"judge function {name!r}", "verdicts")
    verdicts: list[list[Verdict]] = [[] for _ in answers]
    for i, value in zip(rows, values, strict=True):
        if value is None:
            continue
        number = as_number(value)
        if number is None or not 0 <= number <= 1:
            raise UserError(
                f"judge function {name!r} returned {value!r} for prompt {answers[i].id}; a verdict "
                "must be None or a number from 0 to 1."
            )
        verdicts[i] = [Verdict(a, b, name, 1 - number if swapped[i] else number)]
    return verdicts


def text_of(row: PromptRecord, system: str) -> str:
    """The completion of a system that answered."""
    own = row.of(system)
    assert own is not None, system
    return own.completion


def is_swapped(seed: int, a: str, b: str, row: int) -> bool:
    """Whether b's completion of a row is given first: a fair draw for every row and pair."""
    return float(uniform(derive_seed(seed, "order", a, b), row)) < 0.5
