"""Test the last lines of a complete run."""

import shutil
import sys
from dataclasses import replace

from run.ending import next_commands
from tests.helpers import tiny_config

FIRST = """\
first:        source environment/bin/activate
look:         python -m tools.report 'runs/a b'
              tensorboard --logdir='runs/a b'/tensorboard
sample:       python sample.py --run_dir='runs/a b' --prompt='...'
chat:         python train.py --config=configs/chat.py --init_from='runs/a b' --name=tiny-chat
              python chat.py --run_dir=runs/tiny-chat
own text:     python train.py --config=configs/small.py --name=mine --data.source=FOLDER
train longer: the same command with --steps=14 --accept_changes"""
OF_CONVERSATIONS = """\
look:         python -m tools.report 'runs/a b'
              tensorboard --logdir='runs/a b'/tensorboard
chat:         python chat.py --run_dir='runs/a b'
web page:     python chat.py --run_dir='runs/a b' --serve
train longer: the same command with --steps=14 --accept_changes"""


def test_the_end_says_what_people_do_next(tmp_path, monkeypatch):
    (tmp_path / "environment/bin").mkdir(parents=True)
    (tmp_path / "environment/bin/activate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(shutil, "which", lambda name: None)  # the environment is not active
    config = replace(tiny_config(), run_dir="runs/a b", steps=7)
    assert next_commands(config) == FIRST
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    assert next_commands(replace(config, data=replace(config.data, packing="whole"))) == OF_CONVERSATIONS
