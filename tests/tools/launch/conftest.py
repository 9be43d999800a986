"""Define the fixture that every launcher's tests share."""

import pytest

from tests.tools.launch.stand_in import StandIn


@pytest.fixture
def repository(tmp_path, monkeypatch) -> StandIn:
    """Make a repository with a stand-in for train.py, and work in it."""
    made = StandIn(tmp_path / "repository", tmp_path / "notes")
    monkeypatch.chdir(made.root)
    return made
