"""Test that the calculator computes what nanochat's `use_calculator` does (92d63d4), and executes nothing."""

from generation.calculator import calculate

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
    "-" * 200_000 + "1": None,
    "'strawberry'.count('r')": "3",
    '"a b a".count("a")': "2",
    "'x'.count": None,
    "'a'.upper()": None,
    "__import__('os').count('a')": None,
    "open('f').count('a')": None,
    "x.count('a')": None,
}


def test_results():
    assert {expression: calculate(expression) for expression in RESULTS} == RESULTS
