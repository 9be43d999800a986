"""Test that the calculator computes what nanochat's does, and executes nothing."""

import os
import sys
from types import ModuleType

import pytest

from evaluation.calculator import calculate
from tests.nanochat_checkout import import_nanochat

RESULTS = {
    "12*3": "36",
    " 1,000 + 2 ": "1002",
    "-(3 - 5)/4": "0.5",
    "7//2": "3",
    "0.1+0.2": "0.30000000000000004",
    "1/0": None,
    "2**9": None,
    "2 +": None,
    "007": None,
    "1e5": None,
    "0x10": None,
    "(1)(2)": None,
    "": None,
    "9" * 5000: None,
    "(" * 300 + "1" + ")" * 300: None,
    "'strawberry'.count('r')": "3",
    '"a b a".count("a")': "2",
    "'x'.count": None,
    "'a'.upper()": None,
    "__import__('os').count('a')": None,
    "open('f').count('a')": None,
    "x.count('a')": None,
}


@pytest.mark.parametrize("expression", RESULTS, ids=range(len(RESULTS)))
def test_results(expression):
    assert calculate(expression) == RESULTS[expression]


@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="needs nanochat's checkout, and torch")
def test_results_are_nanochats(monkeypatch):
    monkeypatch.setitem(sys.modules, "rustbpe", ModuleType("rustbpe"))  # nanochat's tokenizer imports it
    (engine,) = import_nanochat(monkeypatch, "engine")
    for expression, result in RESULTS.items():
        theirs = engine.use_calculator(expression)
        assert (None if theirs is None else str(theirs)) == result, expression


def test_deep_expressions_end():
    assert calculate("-" * 200_000 + "1") is None
