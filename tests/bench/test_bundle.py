"""A bundle of this repository's code is one that evaluate.py reads, and the same each time."""

import sys

import pytest

from bench import bundle
from configs.schema import UserError
from evaluation.core import KINDS, options, read_bundle


def test_a_bundle_of_code(tmp_path, monkeypatch):
    made = []
    for name in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["bundle", f"--out={tmp_path / name}", "--items=30"])
        assert bundle.main() == 0
        made.append(read_bundle(str(tmp_path / name), None))
    assert made[0] == made[1] and {task.kind for task in made[0]} == set(KINDS)
    for task in made[0]:
        assert len(task.items) == 30
        if task.kind != "language_modeling":
            count = round(1 / task.baseline)
            assert all(len(set(options(task, item))) == len(options(task, item)) == count for item in task.items)
            assert len({item["gold"] for item in task.items}) == count
    with pytest.raises(UserError, match="is there already"):
        bundle.main()
