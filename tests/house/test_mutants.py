"""Claim: a mutant changes one place, of each kind; those that change nothing are still there.

About `tests/mutants.py`.
"""

import ast

import pytest

from tests import mutants

SOURCE = '''
def f(x: int = 1, *, flag: bool = True) -> float:
    """Not 2 + 2."""
    if x < 2 and not flag:
        raise ValueError(f"{x + 1}")
    x += 3
    g(x)
    return torch.exp(x).sum() if flag else -min(x, 0.5)
'''
CHANGES = {
    "1": "2",
    "True": "False",
    "x < 2 and (not flag)": "x < 2 or not flag",
    "x < 2": "x <= 2",
    "2": "3",
    "not flag": "flag",
    "x += 3": "x -= 3",
    "3": "4",
    "g(x)": "pass",
    "torch.exp(x).sum()": "torch.exp(x).mean()",
    "-min(x, 0.5)": "min(x, 0.5)",
    "min(x, 0.5)": "max(x, 0.5)",
    "0.5": "0.75",
}


def changed(source: str) -> list[tuple[str, str]]:
    """Every place of a source, and what may stand there."""
    return [
        (ast.unparse(node), ast.unparse(other))
        for _, node in mutants.places(ast.parse(source))
        for other in mutants.changes(node)
    ]


def test_each_kind_of_place_is_changed_and_no_message_or_annotation():
    found = changed(SOURCE)
    assert CHANGES.items() <= {*found}
    assert {("torch.exp(x)", "torch.expm1(x)"), ("torch.exp(x)", "x")} <= {*found}
    negated = [
        after for _, after in found if after.startswith(("if not (x", "torch.exp(x).sum() if not"))
    ]
    assert len(negated) == 2
    assert len(found) == len(CHANGES) + 4


def test_a_mutant_differs_from_its_module_in_one_place():
    drawn = mutants.mutants("common.losses")
    assert len({mutant.key for mutant in drawn}) == len(drawn) > 100
    source = ast.unparse(ast.parse((mutants.ROOT / "common" / "losses.py").read_text()))
    for mutant in drawn[::10]:
        (line,) = {*mutant.text.splitlines()} - {*source.splitlines()}
        assert mutant.after.split("\n")[0] in line


@pytest.mark.parametrize("key", mutants.equivalent(), ids=lambda key: f"{key[0]} {key[1]}")
def test_a_mutant_that_changes_nothing_is_still_one(key):
    assert key in {mutant.key for mutant in mutants.mutants(key[0])}
    assert mutants.equivalent()[key].endswith(".")
