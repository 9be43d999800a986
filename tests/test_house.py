"""Test that the repository stays within bounds on its size, and that train.py needs no tool."""

from tests.house import closure, counts

BOUNDS = {
    "lines outside tests": 27_120,
    "lines of tests": 20_690,
    "lines of train.py": 180,
    "names that train.py imports": 40,
    "modules that train.py needs": 70,
    "lines that train.py needs": 12_640,
    "options on the command line": 95,
}


def test_nothing_is_larger_than_its_bound():
    larger = {what: count for what, count in counts().items() if count > BOUNDS[what]}
    assert not larger, f"larger than their bounds: {larger}; delete something, or argue for a higher bound"


def test_train_py_needs_no_tool_and_no_preparation_of_text():
    rooms = ("tools/", "serving/", "bench/", "tests/", "data/prepare/")
    assert not [path for path in closure("train.py") if path.startswith(rooms)]
