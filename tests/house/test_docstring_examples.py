"""Claim: docstrings' examples give what they show. About `common` and `experiments.runs.power`."""

import doctest
from importlib import import_module

import pytest
import torch

from tests.map import ROOT, modules

SOURCES = {name: (ROOT / f"{name.replace('.', '/')}.py").read_text() for name in modules()}
WITH_EXAMPLES = [name for name, text in SOURCES.items() if ">>> " in text]
assert "common.padding" in WITH_EXAMPLES


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module(name: str):
    module = import_module(name)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"torch": torch})
    assert sum(len(test.examples) for test in tests) == SOURCES[name].count(">>> ")
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0, test.name


def test_every_objective_s_file_has_an_example():
    files = [*(ROOT / "common" / "objectives").glob("*/[!_]*.py")]
    assert len(files) > 20
    assert [file.stem for file in files if ">>> " not in file.read_text()] == []
