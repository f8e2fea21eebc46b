"""Plans of memory, runs on several processes, and killed runs: a sentence on each."""

from collections.abc import Callable

from experiments.evidence.records.studies import columns, printed


def plans() -> str:
    """How near the plans of memory are to what runs took."""
    ratios = sorted(map(float, columns("plans")["planned / in use"]))
    return (
        f"Of {len(ratios)} real runs on a CPU plans are {ratios[0]:.2f} to {ratios[-1]:.2f} of the "
        "memory in use."
    )


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


TABLES: dict[str, Callable[[], str]] = {"plans": plans, "variants": variants, "kills": kills}
