"""The explained steps: the pages point to lines of code, which are found again."""

from functools import partial

from experiments.evidence.records.studies import RECORDS
from experiments.explain.page import find_lines_again

TABLES: dict[str, object] = {}
FIGURES = {
    page.parent.name: partial(find_lines_again, page) for page in RECORDS.glob("explain-*/*.html")
}
