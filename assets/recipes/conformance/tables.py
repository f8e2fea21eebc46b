"""The table that the command printed, and below it the cases that are not recorded yet."""

from assets.recipes.conformance.case import CASES
from common.report import markdown
from experiments.evidence.records.studies import cells, printed


def conformance() -> str:
    """The table of the cases, and the versions of the libraries."""
    record = printed("conformance/printed.md")
    heads, *rows = cells(record)
    recorded = [row[0] for row in rows]
    empty = ["not recorded yet"] * (len(heads) - 2)
    rows += [[case["name"], *empty, ""] for case in CASES if case["name"] not in recorded]
    return f"{markdown.table(heads, rows)}\n\n{record.splitlines()[-1]}"


TABLES = {"conformance": conformance}
