"""The throughput program's line; nothing about how fast it is."""

import json
import sys

import pytest

from bench import throughput
from configs.schema import UserError
from configs.small import get_config


def test_one_json_line(monkeypatch, capsys):
    arguments = "--config=configs/small.py --depth=1 --rows=1 --micro_batches=3 --timed_steps=1 --mesh.data=8"
    monkeypatch.setattr(sys, "argv", ["throughput", *arguments.split(), "--batch.sequence_length=64"])
    assert throughput.main() == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["depth"], line["width"], line["rows"], line["micro_batches"], line["devices"]) == (1, 64, 1, 3, 8)
    assert line["tokens_per_second"] == pytest.approx(3 * 8 * 64 / line["step_seconds"], rel=0.05)
    assert line["parameters"] == 2 * 4096 * 64 + 12 * 64**2 and line["peak_gib"] > 0


def test_sizes():
    config = throughput.sized(get_config(), throughput.Arguments(depth=20), devices=4)
    assert (config.model.depth, config.model.width, config.model.heads) == (20, 1280, 20)
    with pytest.raises(UserError, match="at least 1"):
        throughput.sized(get_config(), throughput.Arguments(rows=0), devices=1)
