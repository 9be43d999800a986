"""Test what tools.inspect calls damaged; tests/test_train.py runs it on a run's checkpoints."""

from unittest.mock import Mock

import pytest

from configs.retry import StorageLost
from tools import inspect


def test_a_store_that_does_not_answer_is_no_damage(tmp_path, monkeypatch):
    checkpoints = Mock(steps=["."], folder=tmp_path, restore=Mock(side_effect=StorageLost("the store")))
    for name, value in (("open_for_reading", (checkpoints, None)), ("start_jax", None), ("parse_arguments", Mock())):
        monkeypatch.setattr(inspect, name, Mock(return_value=value))
    monkeypatch.setattr(inspect, "fetch_locally", Mock(return_value=tmp_path))
    with pytest.raises(StorageLost):
        inspect.main()
