"""The throughput program's line; nothing about how fast it is."""

import json
import sys

import pytest

from bench import throughput
from bench.measure import Sizes, sized
from configs.plain import get_config
from configs.schema import UserError


def test_one_json_line(monkeypatch, capsys):
    arguments = "--config=configs/plain.py --depth=1 --rows=1 --micro_batches=3 --timed_steps=1 --mesh.data=8"
    monkeypatch.setattr(sys, "argv", ["throughput", *arguments.split(), "--batch.sequence_length=64"])
    assert throughput.main() == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["depth"], line["width"], line["rows"], line["micro_batches"], line["devices"]) == (1, 64, 1, 3, 8)
    assert line["tokens_per_second"] == pytest.approx(3 * 8 * 64 / line["step_seconds"], rel=0.05)
    assert line["parameters"] == 2 * 4096 * 64 + 12 * 64**2 and line["peak_gib"] > 0


def test_sizes():
    config = sized(get_config(), Sizes(depth=20), devices=4)
    assert (config.model.depth, config.model.width, config.model.heads) == (20, 1280, 20)
    with pytest.raises(UserError, match="at least 1"):
        sized(get_config(), Sizes(rows=0), devices=1)


def test_the_profile_names_instructions_and_where_they_come_from(monkeypatch, capsys):
    arguments = "--config=configs/plain.py --depth=1 --rows=1 --micro_batches=2 --timed_steps=1 --profile"
    monkeypatch.setattr(sys, "argv", ["throughput", *arguments.split(), "--batch.sequence_length=64"])
    assert throughput.main() == 0
    head, *rows, total, line = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["ms", "a"] and json.loads(line)["depth"] == 1
    times, shares = zip(*[(float(row.split()[0]), float(row.split()[1].rstrip("%"))) for row in rows])
    assert list(times) == sorted(times, reverse=True) and times[0] > 0
    assert sum(shares) <= 100.5 and sum(times) <= 1.01 * float(total.split()[0]) + 0.2
    assert any("dot_general" in row for row in rows)
