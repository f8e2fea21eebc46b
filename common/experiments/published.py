"""What others report of a recipe's systems: `published.yaml` beside the recipe."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from common.config import UserError, read_recipe


@dataclass(frozen=True)
class Published:
    """A line of `published.yaml`: what somebody reports."""

    system: str  # as the recipe names its stage
    metric: str
    source: str
    value: float | None = None  # accuracies and rates as shares of 1
    note: str = ""
    origin: bool = False  # the implementation that this project started from


def read_published(file: Path) -> list[Published]:
    """The lines of `published.yaml`; none where there is no such file.

    Raises:
        UserError: it is not as it should be.
    """
    if not file.is_file():
        return []
    rows = read_recipe(str(file), typed=True).get("published")
    try:
        found = [Published(**row) for row in rows or ()]
        return [replace(row, value=row.value and float(row.value)) for row in found]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{file} must hold a list `published` of {', '.join(f.name for f in fields(Published))}"
            f" ({error})."
        ) from None


def source_numbers(published: Sequence[Published]) -> dict[str, int]:
    """Every source with its number."""
    return {s: i for i, s in enumerate(dict.fromkeys(row.source for row in published), start=1)}


def source_lines(published: Sequence[Published]) -> Iterator[str]:
    """The sources as a list, each with the notes on its values."""
    for source, number in source_numbers(published).items():
        notes = dict.fromkeys(row.note for row in published if row.source == source and row.note)
        yield f"- ({number}) {source}{': ' if notes else ''}{' '.join(notes)}"
