"""Test which messages a command shows, and the progress lines of long work without a terminal."""

import logging

import pytest

from system.messages import LOGGER, show_messages
from system.progress import progress


@pytest.mark.parametrize(("first", "shown"), [(True, "step 2\nlow disk\n"), (False, "")])
def test_the_first_process_shows_each_message_once(first, shown, capsys, monkeypatch):
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(LOGGER, name, getattr(LOGGER, name))
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])  # as some library does
    show_messages(first)
    LOGGER.info("step 2")
    LOGGER.warning("low disk")
    LOGGER.debug("no message")
    assert capsys.readouterr() == (shown, "")


def test_without_a_terminal_each_interval_has_a_line_with_the_time_left(monkeypatch, capfd):
    monkeypatch.setattr("system.progress.LINE_SECONDS", 0)
    assert list(progress(range(2), desc="encoding", unit="files")) == [0, 1]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "encoding: 0%, 0 of 2 files, ? left" and lines[-1] == "encoding: 100%, 2 of 2 files, 00:00 left"
