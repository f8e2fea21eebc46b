"""What TRL, verl, OpenRLHF and torchrl compute for the same objective, on golden cases.

    make conformance

`cases.json` has the cases: inputs, value and gradient worked out by hand, how each library is
called (one that is not named has no such function), and why it differs. A library is a `Case` whose
methods, one per family of cases, call the library's code and hold no formula.

The exit status is 1 if this project differs, or another library without a reason in `cases.json`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from assets.recipes.conformance.case import CASES, Case, verdict
from common.report import markdown


def table(libraries: Sequence[type[Case]]) -> list[list[str]]:
    """The heads, then a row per case."""
    rows = [["case", *(library.library for library in libraries), "why"]]
    for case in CASES:
        why = "; ".join(f"{name}: {reason}" for name, reason in case.get("why", {}).items())
        rows.append([case["name"], *(verdict(case, library) for library in libraries), why])
    return rows


def unexplained(rows: Sequence[Sequence[str]]) -> list[str]:
    """The cases of a table whose differences are not those that have a reason."""
    reasons = {case["name"]: case.get("why", {}).keys() for case in CASES}
    return [
        row[0]
        for row in rows[1:]
        if {rows[0][at] for at, cell in enumerate(row[:-1]) if "differs" in cell} != reasons[row[0]]
    ]


def main() -> None:
    """Print the table and the versions; exit with 1 where a difference has no reason."""
    for name in ("trl_case", "peers"):
        import_module(f"assets.recipes.conformance.{name}")
    libraries = Case.__subclasses__()
    rows = table(libraries)
    versions = [f"{each.library} {metadata.version(each.library)}" for each in libraries[1:]]
    print(markdown.table(rows[0], rows[1:]), ", ".join(versions), sep="\n\n")
    if wrong := unexplained(rows):
        sys.exit(f"error: differences and reasons do not match: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
