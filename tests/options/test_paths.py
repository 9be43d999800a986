"""Test that a command refuses a path that it cannot open before anything happens."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from system.errors import UserError

CONFIG = f"--config={Path(__file__).parents[2]}/configs/small.py"


@pytest.mark.parametrize(
    ("command", "words", "option"),
    [
        ("train", [CONFIG], "--run_dir=s3://bucket/x"),
        ("train", [CONFIG], "--init_from=s3://bucket/x"),
        ("sample", [], "--run_dir=s3://bucket/x"),
        ("evaluate", ["--run_dir=x"], "--against=s3://bucket/x"),
        ("export", ["--run_dir=x"], "--out=gs://bucket/x"),
        ("tools.report", ["x"], "--out=gs://bucket/x"),
        ("data.prepare.__main__", ["--source=x"], "--out=gs://bucket/x"),
    ],
)
def test_an_unsuitable_url_is_refused_by_name(command, words, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [command, *words, option])
    with pytest.raises(UserError, match=f"^{re.escape(option)} cannot work: give a path on this machine"):
        import_module(command).main()
    assert not list(tmp_path.iterdir())
