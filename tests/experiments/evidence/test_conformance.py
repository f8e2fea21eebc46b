"""Claim: this project computes the golden cases, and each recorded difference has its reason.

TRL computes what is recorded too; the other libraries are not needed: `make conformance` runs them.
A new case is not recorded yet, as the table says. About `assets.recipes.conformance`.
"""

import importlib

import pytest

from assets.recipes.conformance import tables
from assets.recipes.conformance.__main__ import table, unexplained
from assets.recipes.conformance.case import CASES, OurCase, verdict
from common import losses
from experiments.evidence.records import studies

HEADS, *ROWS = RECORD = studies.cells(studies.printed("conformance/printed.md"))
RECORDED = [case for case in CASES if case["name"] in [row[0] for row in ROWS]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_value_and_gradient_are_the_golden_ones(case: dict):
    assert verdict(case, OurCase) == "agrees"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_trl_computes_what_is_recorded(row: list[str]):
    pytest.importorskip("trl")
    trl_case = importlib.import_module("assets.recipes.conformance.trl_case")
    (case,) = (case for case in CASES if case["name"] == row[0])
    assert verdict(case, trl_case.TrlCase) == row[HEADS.index("TRL")]


def test_the_record_is_of_these_cases_and_each_difference_has_a_reason():
    assert [row[0] for row in ROWS] == [case["name"] for case in RECORDED]
    reasons = {row[0]: row[-1] for row in table([OurCase])[1:]}
    for case, row in zip(RECORDED, ROWS, strict=True):
        assert row[-1] == reasons[row[0]]
        for library, cell in zip(HEADS[1:-1], row[1:-1], strict=True):
            call = case["calls"].get(library, "absent")
            is_called = cell.startswith(("agrees", "differs by", "gradient differs by"))
            assert is_called if isinstance(call, dict) else cell == call
    assert unexplained(RECORD) == []


def test_a_new_case_is_listed_as_not_recorded_yet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "CASES", [{"name": "new"}, *RECORDED])
    new = ["new", *["not recorded yet"] * (len(HEADS) - 2), ""]
    assert studies.cells(tables.conformance()) == [*RECORD, new]


def test_a_changed_verdict_is_found():
    for at, row in enumerate(ROWS, 1):
        for column, cell in enumerate(row):
            changed = {"agrees": "differs by 1"}.get(cell, "agrees" if "differs" in cell else None)
            if changed and 0 < column < len(row) - 1:
                rows = [HEADS, *map(list, ROWS)]
                rows[at][column] = changed
                assert unexplained(rows) == [row[0]]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (losses._KL["k2"], "differs by"),
        (lambda d: (d.expm1() - d).detach() + d - d.detach(), "gradient differs by"),
    ],
)
def test_a_changed_formula_is_found(formula, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(losses._KL, "k3", formula)
    rows = table([OurCase])
    assert any(row[1].startswith(expected) for row in rows[1:])
    assert set(unexplained(rows)) >= {row[0] for row in rows[1:] if row[1] != "agrees"}
