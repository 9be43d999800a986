"""Test which messages a command shows."""

import logging

import pytest

from configs.messages import LOGGER, show_messages


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
