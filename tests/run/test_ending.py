"""Test the last lines of a complete run."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from run.ending import next_commands
from tests.helpers import tiny_config

LOOK = ["python -m tools.report 'runs/a b'", "tensorboard --logdir='runs/a b'/tensorboard"]
CHAT = "python chat.py --run_dir='runs/a b'"


@pytest.mark.parametrize(
    ("packing", "heads", "commands"),
    [
        (
            "stream",
            ["look", "sample", "chat", "own text"],
            [
                "python sample.py --run_dir='runs/a b' --prompt='...'",
                "python train.py --config=configs/chat.py --init_from='runs/a b' --name=tiny-chat",
                "python chat.py --run_dir=runs/tiny-chat",
                "python train.py --config=configs/small.py --name=mine --data.source=FOLDER",
            ],
        ),
        ("whole", ["look", "chat", "web page"], [CHAT, f"{CHAT} --serve"]),
    ],
)
def test_the_end_says_what_people_do_next(packing, heads, commands, tmp_path, monkeypatch):
    """Without an active environment, the first of the lines activates it."""
    config = tiny_config()
    config = replace(config, run_dir="runs/a b", steps=7, data=replace(config.data, packing=packing))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    lines = [(line[:14].strip(" :"), line[14:]) for line in next_commands(config).splitlines()]
    assert [head for head, _ in lines if head] == [*heads, "train longer"]
    assert [command for _, command in lines[:-1]] == [*LOOK, *commands]
    assert "--steps=14 --accept_changes" in lines[-1][1]

    monkeypatch.setattr(shutil, "which", lambda name: None)
    first, *others = next_commands(config).splitlines()
    assert first.split(":")[1].split() == ["source", str(Path(tmp_path.name, "bin", "activate"))]
    assert len(others) == len(lines)
