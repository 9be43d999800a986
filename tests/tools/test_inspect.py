"""Test what tools.inspect calls damaged; tests/test_train.py runs it on a run's checkpoints."""

import sys
from unittest.mock import Mock

import pytest

from configs.retry import StorageLost
from tools import inspect


def test_a_store_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, capsys):
    (tmp_path / "10").mkdir()
    checkpoints = Mock(steps=[10], folder=tmp_path, restore=Mock(side_effect=StorageLost("the store")))
    monkeypatch.setattr(inspect, "open_for_reading", lambda folder: (checkpoints, None))
    monkeypatch.setattr(inspect, "start_jax", Mock())
    monkeypatch.setattr(sys, "argv", ["inspect", str(tmp_path)])
    with pytest.raises(StorageLost):
        inspect.main()
    assert "DAMAGED" not in capsys.readouterr().out
