"""Which models are right, as the command prints it."""

from collections.abc import Callable
from functools import partial

from experiments.evidence.records.studies import printed

TABLES: dict[str, Callable[[], str]] = {
    name: partial(printed, f"{name}/printed.md") for name in ("models", "models-two-ranks")
}
