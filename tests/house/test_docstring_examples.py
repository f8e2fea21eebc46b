"""Claim: docstrings' examples give what they show. About `common` and `experiments.runs.power`."""

import doctest
from importlib import import_module

import pytest
import torch

MODULES = {  # and the number of functions with an example
    "common.padding": 3,
    "common.losses": 4,
    "common.advantages": 2,
    "common.evaluation.accuracy": 1,
    "common.evaluation.intervals": 1,
    "common.text.tokenise": 2,
    "common.text.overlap": 1,
    "common.evaluation.pass_rates": 1,
    "experiments.runs.power": 2,
}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name: str):
    module = import_module(name)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"torch": torch})
    tests = [test for test in tests if test.examples]
    assert len(tests) == MODULES[name]
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0, test.name
