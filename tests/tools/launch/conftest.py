"""What every launcher's tests start from."""

import pytest

from tests.tools.launch.stand_in import StandIn


@pytest.fixture
def repository(tmp_path, monkeypatch) -> StandIn:
    """A repository with a stand-in for train.py, which is the working folder."""
    made = StandIn(tmp_path / "repository", tmp_path / "notes")
    monkeypatch.chdir(made.root)
    return made
