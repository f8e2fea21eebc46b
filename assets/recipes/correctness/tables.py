"""Runs on several processes, and killed runs: a sentence on each."""

from collections.abc import Callable

from experiments.evidence.records.studies import columns, printed


def variants() -> str:
    """How alike runs on one process and on several are."""
    found = columns("variants")
    drawn = [cell for cell in found["other completions"] if cell[0] not in "0-"]
    return (
        f"Of {len(found['variant'])} variants the largest relative difference of a loss is "
        f"{max(map(float, found['loss'])):.1e}; {len(drawn)} drew another completion; "
        f"{sum(map(int, found['warnings']))} warnings."
    )


def kills() -> str:
    """Totals of the fault drill: the last line that it printed."""
    return printed("kills/printed.md").splitlines()[-1]


TABLES: dict[str, Callable[[], str]] = {"variants": variants, "kills": kills}
