"""The exercises, and the table that the command prints."""

from collections.abc import Callable
from functools import partial

from assets.recipes.exercises.exercises import questions
from experiments.evidence.records.studies import printed

TABLES: dict[str, Callable[[], str]] = {
    "questions": questions,
    "exercises": partial(printed, "exercises/printed.md"),
}
