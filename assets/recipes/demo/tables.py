"""The demo: means over seeds, and the report's table of the first one."""

from collections.abc import Callable
from functools import partial

from common.report import evaluation_report
from experiments.evidence.records.replications import draw, evaluations, means


def systems() -> str:
    """The table of systems in the report of the first seed."""
    return str(evaluation_report.systems_table(evaluations("demo")["0"]))


TABLES: dict[str, Callable[[], str]] = {
    "demo.systems": systems,
    "demo.mean": partial(means, "demo"),
}
FIGURES = {"demo": partial(draw, "demo")}
