"""The program that measures what saving costs; nothing about how much it is."""

import json
import sys

import pytest

from bench import checkpoints

PLAIN = "--config=configs/plain.py --model.depth=1 --model.width=64 --model.heads=1 --model.kv_heads=1 --saves=1"


@pytest.mark.medium
@pytest.mark.parametrize(("steps", "key"), [(0, "seconds_until_written"), (2, "slower")])
def test_one_json_line(monkeypatch, capsys, steps, key):
    sizes = f"{PLAIN} --batch.sequence_length=16 --batch.tokens_per_step=128 --steps_between={steps}"
    monkeypatch.setattr(sys, "argv", ["checkpoints", *sizes.split()])
    assert checkpoints.main() == 0
    line = json.loads(capsys.readouterr().out)
    parameters = 2 * 4096 * 64 + 12 * 64**2
    assert line["gigabytes"] == pytest.approx(12e-9 * parameters, abs=1e-3) and key in line
