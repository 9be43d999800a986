"""Test the progress lines of long work without a terminal."""

import configs.messages
from configs.messages import progress


def test_without_a_terminal_each_interval_has_a_line_with_the_time_left(monkeypatch, capfd):
    monkeypatch.setattr(configs.messages, "EVERY", 0)
    assert list(progress(range(2), desc="encoding", unit="files")) == [0, 1]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "encoding: 0%, 0 of 2 files, ? left" and lines[-1] == "encoding: 100%, 2 of 2 files, 00:00 left"


def test_short_work_says_nothing(capfd):
    list(progress(range(2), desc="encoding"))
    assert capfd.readouterr().err == ""
