"""Test that the repository stays within bounds on its size, and that train.py needs no tool."""

import ast

from tests.house import ROOT, closure, counts

BOUNDS = {
    "lines outside tests": 27_155,
    "lines of tests": 20_730,
    "lines of train.py": 180,
    "names that train.py imports": 40,
    "modules that train.py needs": 68,
    "lines that train.py needs": 12_140,
    "options on the command line": 95,
}
LARGE = {"Attention", "Build", "Config", "DataConfig", "GPT", "Log", "Machine", "ModelConfig", "OptimizerConfig"}
LARGE |= {"Progress", "Text"}
"""Classes of the core with more than eight attributes, or six arguments of a constructor that is written out. Their
docstrings say why."""


def test_nothing_is_larger_than_its_bound():
    larger = {what: count for what, count in counts().items() if count > BOUNDS[what]}
    assert not larger, f"larger than their bounds: {larger}; delete something, or argue for a higher bound"


def test_train_py_needs_no_tool_and_no_preparation_of_text():
    rooms = ("tools/", "serving/", "bench/", "tests/", "data/prepare/")
    assert not [path for path in closure("train.py") if path.startswith(rooms)]


def test_no_other_class_of_the_core_is_large():
    large, own = set(), lambda node: isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    nodes = [node for path in closure("train.py") for node in ast.walk(ast.parse((ROOT / path).read_text()))]
    for kind in (node for node in nodes if isinstance(node, ast.ClassDef)):
        names = {node.attr for node in ast.walk(kind) if own(node) and isinstance(node.ctx, ast.Store)}
        names |= {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)}
        made = [node.args for node in kind.body if getattr(node, "name", "") == "__init__"]
        if len(names) > 8 or any(len([*it.args, *it.kwonlyargs]) > 1 + 6 for it in made):
            large.add(kind.name)
    assert large == LARGE
